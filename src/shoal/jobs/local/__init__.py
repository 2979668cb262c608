"""The queue of one host: a store in a file, a pure decision, a scheduler, a supervisor for each job."""
