"""`trigram plan`: predictions, the choice, plan.json, and the measurement of a real job."""
