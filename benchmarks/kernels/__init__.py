"""What each kernel is measured on, beside other implementations."""
