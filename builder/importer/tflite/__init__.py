"""Read TensorFlow Lite files (`.tflite`) and write them as ONNX graphs: one pipeline compiles both."""
