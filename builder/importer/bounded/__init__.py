"""Values whose length is only known at run time: padded to a capacity, with their true length beside them."""
