//! Numbers and durations in messages.

/// The number of jobs, in words for a message.
pub(crate) fn counted(jobs: usize) -> String {
    if jobs == 1 { "1 job".to_owned() } else { format!("{jobs} jobs") }
}

/// A duration in its two largest units, such as `1h 30m`.
pub(crate) fn format_duration(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    let units = [(86_400, "d"), (3_600, "h"), (60, "m"), (1, "s")];
    let Some(first) = units.iter().position(|(length, _)| whole >= *length) else {
        return "0s".to_owned();
    };
    let (length, name) = units[first];
    let mut text = format!("{}{name}", whole / length);
    if let Some((smaller, name)) = units.get(first + 1)
        && whole % length / smaller > 0
    {
        text.push_str(&format!(" {}{name}", whole % length / smaller));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_shows_its_two_largest_units() {
        for (seconds, text) in [
            (0.2, "0s"),
            (-5.0, "0s"),
            (59.0, "59s"),
            (60.0, "1m"),
            (61.0, "1m 1s"),
            (3_600.0, "1h"),
            (7_325.0, "2h 2m"),
            (90_061.0, "1d 1h"),
        ] {
            assert_eq!(format_duration(seconds), text);
        }
    }
}
