"""Starting the workers of a job and watching over them.

`local` starts the workers of this host; `watch` waits for the first of them to fail, and `stalls` looks whether they
move (by `stacks` and `process_state`). `worker` is what runs inside one; `report` holds the error that a worker leaves,
and finds the first cause; `output` is where its printed lines go. `dry_run` builds the model before workers start.
`server_supervisor` starts parameter servers, for workers of this launcher (`server_broker`) or alone (`standalone`).
`from_function` is `shoal.launch`; it sends the function by `by_value`.
"""
