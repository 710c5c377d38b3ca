"""What a backward pass does with a model's gradients: buckets, what they pass, averages."""
