"""gluefl."""
