//! The contestant's side of the conversation: `ready`, wait for a line, `at N` on the way, figures at the end.
//! The controller's side is `child`. Ours and the limit use this; the peers have the same in their own programs.

use crate::Failure;
use serde_json::Value;
use std::io::{BufRead, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What a contestant is started for.
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
        format!("the command is {:?}, which {} does not know", self.command, self.variant).into()
    }
}

/// Says that everything is prepared, and waits for the word.
pub(crate) async fn ready() -> Result<(), Failure> {
    say("ready");
    Ok(told().await?)
}

/// Waits for a line of the controller.
pub(crate) async fn told() -> Result<(), tokio::task::JoinError> {
    tokio::task::spawn_blocking(|| {
        // A controller that is gone says nothing more.
        let _ = std::io::stdin().lock().read_line(&mut String::new());
    })
    .await
}

/// Says the figures, and stays until the controller has read what this process has used.
pub(crate) fn finish(figures: &Value) -> Result<(), Failure> {
    say(&figures.to_string());
    for line in std::io::stdin().lock().lines() {
        line?;
    }
    Ok(())
}

pub(crate) fn say(line: &str) {
    let mut stdout = std::io::stdout().lock();
    // A controller that is gone needs no answer.
    let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
}

/// Between two samples of a latency: spread over 5 to 25 ms, the same for every contestant.
pub(crate) fn pause(sample: u64) -> Duration {
    Duration::from_millis(5 + sample * 7919 % 21)
}

pub(crate) fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
