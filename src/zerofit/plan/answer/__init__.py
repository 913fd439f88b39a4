"""Write the answer of a plan; give the first one by formula."""
