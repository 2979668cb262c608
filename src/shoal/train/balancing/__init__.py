"""From measured speeds to the share of a step that each worker computes."""
