//! Plots as SVG: horizontal bars, and lines over time. Readable on light and dark pages.

use crate::figures::short;
use serde::{Deserialize, Serialize};

/// A plot.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Plot {
    /// The name of the file.
    pub(crate) name: String,
    pub(crate) title: String,
    /// The unit of the values.
    pub(crate) unit: String,
    pub(crate) shape: Shape,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Shape {
    Bars(Vec<Bar>),
    Lines { x_unit: String, lines: Vec<Line> },
}

impl Default for Shape {
    fn default() -> Shape {
        Shape::Bars(Vec::new())
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Bar {
    pub(crate) label: String,
    pub(crate) value: f64,
    /// Whether it is our worker, which is highlighted.
    pub(crate) ours: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Line {
    pub(crate) label: String,
    pub(crate) points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 760.0;
/// The smallest width of the labels of bars, and the width of one of their characters.
const LABELS: f64 = 270.0;
const CHARACTER: f64 = 6.8;
const BAR: f64 = 22.0;
const TOP: f64 = 44.0;
const HEIGHT_OF_LINES: f64 = 260.0;
const COLOURS: [&str; 5] = ["#2f81f7", "#d2832a", "#3fa45b", "#a371f7", "#8c959f"];

/// Width and height of an entry of the legend, and the number of entries side by side.
const LEGEND: (f64, f64) = (220.0, 18.0);
const LEGEND_COLUMNS: usize = 3;

// Middle greys are readable on white and black, for viewers that do not report their colour scheme.
const STYLE: &str = "\
text { font: 13px system-ui, sans-serif; fill: #6e7781 } .title { font-weight: 600; font-size: 14px } \
.axis { stroke: #8c959f; stroke-width: 1 } .grid { stroke: #8c959f; stroke-opacity: .25 } \
.ours { fill: #2f81f7 } .other { fill: #8c959f } \
@media (prefers-color-scheme: light) { text { fill: #1f2328 } } \
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }";

impl Plot {
    pub(crate) fn svg(&self) -> String {
        let (height, body) = match &self.shape {
            Shape::Bars(bars) => self.bars(bars),
            Shape::Lines { x_unit, lines } => self.lines(x_unit, lines),
        };
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
             height=\"{height}\" role=\"img\" aria-label=\"{title}\">\n<style>{STYLE}</style>\n\
             <text class=\"title\" x=\"8\" y=\"22\">{title}</text>\n{body}</svg>\n",
            title = escaped(&self.title),
        )
    }

    fn bars(&self, bars: &[Bar]) -> (f64, String) {
        let longest = bars.iter().map(|bar| bar.label.chars().count()).max().unwrap_or(0);
        let labels = LABELS.max(longest as f64 * CHARACTER + 16.0);
        let room = WIDTH - labels - 90.0;
        let top = nice_top(bars.iter().map(|bar| bar.value));
        let bottom = TOP + bars.len() as f64 * (BAR + 8.0);
        let mut body = String::new();
        for step in 0..=4 {
            let value = top * f64::from(step) / 4.0;
            let x = labels + room * f64::from(step) / 4.0;
            body += &line("grid", (x, TOP - 4.0), (x, bottom));
            body += &text(x, bottom + 18.0, "middle", &short(value));
        }
        for (at, bar) in bars.iter().enumerate() {
            let y = TOP + at as f64 * (BAR + 8.0);
            let class = if bar.ours { "ours" } else { "other" };
            let width = (room * bar.value / top).max(1.0);
            body += &text(labels - 8.0, y + 16.0, "end", &bar.label);
            body += &format!(
                "<rect class=\"{class}\" x=\"{labels}\" y=\"{y}\" width=\"{width:.1}\" height=\"{BAR}\" rx=\"2\"/>\n"
            );
            body += &text(labels + width + 6.0, y + 16.0, "start", &short(bar.value));
        }
        body += &line("axis", (labels, TOP - 4.0), (labels, bottom));
        body += &text(labels + room / 2.0, bottom + 36.0, "middle", &self.unit);
        (bottom + 46.0, body)
    }

    fn lines(&self, x_unit: &str, lines: &[Line]) -> (f64, String) {
        let more_legend = lines.len().saturating_sub(1) / LEGEND_COLUMNS;
        let top_of_lines = TOP + 20.0 + more_legend as f64 * LEGEND.1;
        let (left, right, bottom) = (80.0, WIDTH - 20.0, top_of_lines + HEIGHT_OF_LINES);
        let points = || lines.iter().flat_map(|line| &line.points);
        let top = nice_top(points().map(|(_, y)| *y));
        let end = points().map(|(x, _)| *x).fold(1e-9, f64::max);
        let place = |(x, y): (f64, f64)| (left + (right - left) * x / end, bottom - HEIGHT_OF_LINES * y / top);
        let mut body = String::new();
        for step in 0..=4 {
            let part = f64::from(step) / 4.0;
            let (x, y) = place((end * part, top * part));
            body += &line("grid", (left, y), (right, y));
            body += &text(left - 8.0, y + 4.0, "end", &short(top * part));
            body += &text(x, bottom + 18.0, "middle", &short(end * part));
        }
        for (at, series) in lines.iter().enumerate() {
            let colour = COLOURS[at % COLOURS.len()];
            let path: Vec<String> =
                series.points.iter().map(|point| place(*point)).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            body += &format!(
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\n",
                path.join(" ")
            );
            let x = left + (at % LEGEND_COLUMNS) as f64 * LEGEND.0;
            let y = 36.0 + (at / LEGEND_COLUMNS) as f64 * LEGEND.1;
            body += &format!("<rect x=\"{x}\" y=\"{y}\" width=\"14\" height=\"4\" fill=\"{colour}\"/>\n");
            body += &text(x + 20.0, y + 8.0, "start", &series.label);
        }
        body += &line("axis", (left, bottom), (right, bottom));
        body += &text((left + right) / 2.0, bottom + 36.0, "middle", x_unit);
        body += &text(left - 8.0, top_of_lines - 10.0, "end", &self.unit);
        (bottom + 46.0, body)
    }
}

/// The end of an axis: a round number that is at least as large as all values.
fn nice_top(values: impl Iterator<Item = f64>) -> f64 {
    let highest = values.fold(0.0, f64::max);
    if highest <= 0.0 {
        return 1.0;
    }
    let magnitude = 10_f64.powf(highest.log10().floor());
    let steps = [1.0, 2.0, 4.0, 6.0, 8.0, 10.0];
    steps.into_iter().map(|step| step * magnitude).find(|top| *top >= highest).unwrap_or(10.0 * magnitude)
}

fn text(x: f64, y: f64, anchor: &str, content: &str) -> String {
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>\n", escaped(content))
}

fn line(class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) -> String {
    format!("<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>\n")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_ends_at_or_after_the_highest_value() {
        for (highest, top) in [(0.0, 1.0), (0.34, 0.4), (1.0, 1.0), (48_000.0, 60_000.0), (99.0, 100.0)] {
            assert!((nice_top([highest].into_iter()) - top).abs() < 1e-9 * top, "{highest}");
        }
    }

    #[test]
    fn a_legend_of_many_lines_stays_within_the_picture() {
        let line = |n: usize| Line { label: format!("line {n}"), points: vec![(1.0, 1.0)] };
        let shape = |count| Shape::Lines { x_unit: String::new(), lines: (0..count).map(line).collect() };
        let picture = |count| Plot { shape: shape(count), ..Plot::default() }.svg();
        let entries = |svg: &str| -> Vec<(f64, f64)> {
            let number = |rect: &str, name: &str| {
                let (_, rest) = rect.split_once(&format!(" {name}=\""))?;
                rest.split('"').next()?.parse::<f64>().ok()
            };
            svg.lines()
                .filter_map(|tag| tag.strip_prefix("<rect"))
                .map(|rect| (number(rect, "x").unwrap_or(f64::NAN), number(rect, "y").unwrap_or(f64::NAN)))
                .collect()
        };
        let five = entries(&picture(5));
        assert_eq!(five.len(), 5);
        assert!(five.iter().all(|(x, _)| x + LEGEND.0 <= WIDTH), "{five:?}");
        assert_eq!(five[3], (five[0].0, five[0].1 + LEGEND.1));
        assert!(five.iter().enumerate().all(|(at, place)| !five[..at].contains(place)), "{five:?}");
    }

    #[test]
    fn names_cannot_break_the_picture() {
        let bar = Bar { label: "<a> & \"b\"".to_owned(), value: 1.0, ours: true };
        let plot = Plot { shape: Shape::Bars(vec![bar]), ..Plot::default() };
        assert!(plot.svg().contains("&lt;a> &amp; &quot;b&quot;"));
    }
}
