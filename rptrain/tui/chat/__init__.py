"""The Chat screen: a conversation with a trained model, which a child process loads."""
