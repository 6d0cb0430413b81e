"""A Flower app in which one node after the other is hostile. The attacks are those of the tests."""
