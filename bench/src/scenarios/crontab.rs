//! Crontabs, without a database: parsing a large one, and computing when an item fires next.

use super::{Bench, header};
use crate::Failure;
use crate::figures::{quantile, short};
use crate::report::{Goal, Section};
use chrono::{DateTime, TimeDelta, Utc};
use graphile_worker::{Crontab, parse_crontab};
use std::time::Instant;

const LINES: usize = 10_000;

/// Number of times at which the next fire time of each item is computed.
const QUESTIONS: i32 = 2_000;

/// Schedules from common to rare.
const ITEMS: [&str; 7] = [
    "* * * * * t",
    "*/20 8-18 * * mon-fri t",
    "0 0 13 * 5 t",
    "0 0 29 2 * t",
    "0 0 31 2 * t",
    "30 2 * * * t ?tz=Europe/Paris",
    "*/10 * 2 29 2 * t ?tz=America/New_York",
];

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let crontab: String = (0..LINES)
        .map(|n| format!("{} */4 * * 1-5 task ?id=item_{n}&fill=2d&max=10&queue=q {{n: {n}, text: 'abc'}}\n", n % 60))
        .collect();
    let mut milliseconds = Vec::new();
    for _ in 0..bench.rounds.max(3) {
        let began = Instant::now();
        let items = parse_crontab(&crontab)?;
        milliseconds.push(began.elapsed().as_secs_f64() * 1e3);
        assert_eq!(items.len(), LINES, "all lines are parsed");
    }
    let reading = quantile(&milliseconds, 0.5);
    let mut rows = vec![vec![format!("read {LINES} lines with options and payload"), format!("{} ms", short(reading))]];
    let mut slowest: f64 = 0.0;
    for line in ITEMS {
        let microseconds = next_fire_time(&line.parse()?);
        slowest = slowest.max(microseconds);
        rows.push(vec![format!("next fire time of `{line}`"), format!("{} µs", short(microseconds))]);
    }
    Ok(Section {
        title: "Crontab".to_owned(),
        method: "Without a database. Parsing: the median of the rounds. Fire times: the mean of 2,000 calls, at \
                 times 37 hours apart."
            .to_owned(),
        header: header(&["", "takes"]),
        rows,
        goals: vec![
            Goal::at_most("crontab: reading 10,000 lines, ms", 50.0, reading, short),
            Goal::at_most("crontab: next fire time of the slowest item, µs", 10.0, slowest, short),
        ],
        ..Section::default()
    })
}

/// Mean microseconds per call.
fn next_fire_time(item: &Crontab) -> f64 {
    let mut at = DateTime::<Utc>::UNIX_EPOCH;
    let began = Instant::now();
    for _ in 0..QUESTIONS {
        std::hint::black_box(item.next_after(std::hint::black_box(at)));
        at += TimeDelta::hours(37);
    }
    began.elapsed().as_secs_f64() * 1e6 / f64::from(QUESTIONS)
}
