"""Independent references in plain torch and NumPy. Nothing here imports trigram."""
