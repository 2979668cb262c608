"""Growing data: training on what is new without losing what is old."""
