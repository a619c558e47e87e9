"""What expert-aware scheduling is worth: predictors, composers and shedding on recorded and planted routings."""
