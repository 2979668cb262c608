"""What the launcher does when a worker is lost: whether to start again, and the starts.

`retries` decides whether there is another start, and `supervise` leads a job through its starts.
"""
