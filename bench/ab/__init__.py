"""Two configurations beside each other: `headway ab`."""
