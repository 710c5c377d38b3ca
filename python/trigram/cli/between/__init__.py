"""`trigram doctor` between hosts: who reaches whom, how fast, and what to change before a job."""
