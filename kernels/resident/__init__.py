"""Operations on rows that stay where a device keeps them: token-major planes of fixed capacity."""
