"""`shoal page`, `shoal trace` and `/metrics`: a run as a person sees it, from the files in its folder alone.

columns.py     the steps of one rank as numpy columns, loaded beside and followed
run_log.py     a run's folder: who wrote there, and what
pictures.py    what the page draws: curves, the heat map, where time went, memory, servers
timeline.py    every rank's spans on one clock, and the pipeline's schedule as it ran
server.py      HTTP on 127.0.0.1, for holders of a token
export.py      the page as one file
metrics.py     Prometheus' text
trace.py       Chrome's and Perfetto's JSON
web/           the page itself: HTML, CSS and JavaScript by hand, put together when it is served
"""
