"""Steps that pipelines share, and the contract every stage keeps."""
