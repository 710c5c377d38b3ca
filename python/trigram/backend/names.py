"""What torch calls the backend, and the devices that it serves."""

NAME = "trigram"
DEVICES = ("cpu", "cuda")
