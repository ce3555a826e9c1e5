"""The tuning loop as pure logic: recorded events in, the next instruction out."""
