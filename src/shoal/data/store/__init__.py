"""The training store: Arrow files of one record batch each, mapped into memory, and a manifest for each version."""
