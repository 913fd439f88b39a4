"""Write the answer of a plan."""
