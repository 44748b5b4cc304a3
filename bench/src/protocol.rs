//! The contestant's side of the protocol that `child` describes: send `ready`, wait for a line, report `at N`, send the
//! results. Our worker and the limit use this file; the peers implement the same in their own programs.

use crate::Failure;
use serde_json::Value;
use std::io::{BufRead, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The task of a contestant, from its arguments.
pub(crate) struct Task {
    pub(crate) variant: String,
    pub(crate) command: String,
    pub(crate) url: String,
    pub(crate) number: u64,
}

impl Task {
    pub(crate) fn parse(arguments: &[String]) -> Result<Task, Failure> {
        let [variant, command, url, rest @ ..] = arguments else {
            return Err(format!(
                "{} arguments for a contestant, expected VARIANT COMMAND URL [NUMBER]",
                arguments.len()
            )
            .into());
        };
        Ok(Task {
            variant: variant.clone(),
            command: command.clone(),
            url: url.clone(),
            number: rest.first().map_or(Ok(0), |number| number.parse())?,
        })
    }

    pub(crate) fn unknown_command(&self) -> Failure {
        format!("unknown command {:?} for {}", self.command, self.variant).into()
    }
}

/// Sends `ready` and waits for `go`.
pub(crate) async fn ready() -> Result<(), Failure> {
    send_line("ready");
    Ok(line_received().await?)
}

/// Waits for a line from the controller.
pub(crate) async fn line_received() -> Result<(), tokio::task::JoinError> {
    tokio::task::spawn_blocking(|| {
        // The controller is gone.
        let _ = std::io::stdin().lock().read_line(&mut String::new());
    })
    .await
}

/// Sends the results, and waits until the controller has read this process's CPU time and memory.
pub(crate) fn finish(figures: &Value) -> Result<(), Failure> {
    send_line(&figures.to_string());
    for line in std::io::stdin().lock().lines() {
        line?;
    }
    Ok(())
}

pub(crate) fn send_line(line: &str) {
    let mut stdout = std::io::stdout().lock();
    // Ignore the error: the controller is gone.
    let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
}

/// The pause before a latency sample: from 5 to 25 ms, the same sequence for every contestant.
pub(crate) fn pause(sample: u64) -> Duration {
    Duration::from_millis(5 + sample * 7919 % 21)
}

pub(crate) fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
