"""What a job shows of itself: records of calls, timelines, dumps after a failure."""
