"""Kubernetes: from a job to a Job, JobSet or TrainJob, and `kubectl`."""
