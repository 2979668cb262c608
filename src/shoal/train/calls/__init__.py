"""What every rank gives and calls: compared, and ended in a sentence where it differs."""
