"""Measurements a user can repeat: contestants side by side on hosts and networks made for the purpose."""
