"""What a dilated pattern learns (`python -m benchmarks learn`): influence, recall at a distance, text, borders."""
