"""What a model will take, before it is there: `headway plan`."""
