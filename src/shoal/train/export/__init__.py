"""`shoal export`: the trained model as it is served, beside itself in whole numbers and in ONNX Runtime."""
