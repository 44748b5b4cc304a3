def task(numbers, helpers):
    return [ValueError("odd") if number % 2 else None for number in numbers]
