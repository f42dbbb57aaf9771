"""How codes are chosen: pure tensor algorithms, one file a method."""
