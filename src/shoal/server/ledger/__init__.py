"""The ledger: which part of which step is whose, what is done, and who may go on."""
