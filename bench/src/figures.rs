//! Medians and percentiles, and how numbers are formatted.

/// One figure, measured in several rounds.
#[derive(Debug, Clone, Default)]
pub(crate) struct Figures(Vec<f64>);

impl Figures {
    pub(crate) fn add(&mut self, value: f64) {
        self.0.push(value);
    }

    pub(crate) fn median(&self) -> f64 {
        quantile(&self.0, 0.5)
    }

    /// The median, with the lowest and highest value if there are several rounds.
    pub(crate) fn with_spread(&self, write: impl Fn(f64) -> String) -> String {
        let (lowest, highest) = (quantile(&self.0, 0.0), quantile(&self.0, 1.0));
        match self.0.len() {
            0 | 1 => write(self.median()),
            _ => format!("{} ({} – {})", write(self.median()), write(lowest), write(highest)),
        }
    }
}

/// The value below which this share of the values lies; 0 if there are none.
pub(crate) fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let at = part * last as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    below + (above - below) * at.fract()
}

/// 48,312
pub(crate) fn count(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = if value <= -0.5 { "-".to_owned() } else { String::new() };
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// About three significant digits: 0, 0.34, 2.35, 20.5, 205, 1,230
pub(crate) fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        low if low < 10.0 => format!("{value:.2}"),
        middle if middle < 100.0 => format!("{value:.1}"),
        _ => count(value),
    }
}

/// 1.35 ×
pub(crate) fn times(value: f64) -> String {
    format!("{} ×", short(value))
}

pub(crate) fn milliseconds(seconds: f64) -> f64 {
    seconds * 1e3
}

pub(crate) fn megabytes(bytes: f64) -> f64 {
    bytes / (1024.0 * 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_lies_between_the_values_it_falls_between() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(quantile(&values, 0.5), 2.5);
        assert_eq!(quantile(&values, 0.0), 1.0);
        assert_eq!(quantile(&values, 1.0), 4.0);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }

    #[test]
    fn thousands_are_kept_apart() {
        assert_eq!(count(0.0), "0");
        assert_eq!(count(999.6), "1,000");
        assert_eq!(count(1_234_567.0), "1,234,567");
        assert_eq!(count(-1_234.0), "-1,234");
    }

    #[test]
    fn the_spread_is_said_where_there_were_rounds() {
        let mut figures = Figures::default();
        figures.add(2.0);
        assert_eq!(figures.with_spread(short), "2.00");
        figures.add(1.0);
        figures.add(400.0);
        assert_eq!(figures.with_spread(short), "2.00 (1.00 – 400)");
    }
}
