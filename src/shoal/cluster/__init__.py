"""Starting the workers of a job and watching over them.

`local` starts the workers of this host; `watch` waits for the first of them to fail; `worker` is what runs
inside one; `report` is how it says what went wrong; `output` is where its printed lines go.
"""
