"""`make herd`: how a thousand agents come back after their broker was restarted."""
