"""What every part asks of the interpreter: functions' signatures, forked children."""
