def is_flash_attn_greater_or_equal_2_10() -> bool:
    return True
