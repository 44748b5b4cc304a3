//! The format of the log on standard error: short lines for people, or one JSON object per line for machines.
//!
//! ```text
//! [job 42 send_email] INFO: job completed (0.16ms)
//! {"time":"…","level":"INFO","message":"job completed","label":"job","worker_id":"…","job_id":42,"ms":0.16}
//! ```

use chrono::{SecondsFormat, Utc};
use graphile_worker::short_worker_id;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::error::Error;
use std::fmt::{Debug, Write as _};
use std::io::{IsTerminal, Write as _};
use std::sync::OnceLock;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    // One JSON object per line.
    Json,
    // For people.
    Text,
}

/// Starts logging to standard error, filtered by `RUST_LOG`, or by `level` if that is not set. The debug variables of
/// Node's worker add debug lines to `level`. If the application has already set up a subscriber, that one stays.
pub(crate) fn start(format: LogFormat, level: &str) {
    let _ = STARTED.set(format);
    let debug = ["GRAPHILE_LOGGER_DEBUG", "GRAPHILE_WORKER_DEBUG"].map(std::env::var_os);
    let details = match debug.iter().flatten().any(|value| !value.is_empty()) {
        true => ",graphile_worker=debug,graphile_worker_cli=debug",
        false => "",
    };
    let default = || EnvFilter::new(format!("{level},sqlx=error{details}"));
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| default());
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|no| no.is_empty());
    let _ = tracing_subscriber::registry().with(filter).with(Lines { format, colours }).try_init();
}

static STARTED: OnceLock<LogFormat> = OnceLock::new();

/// Prints the error with which the program exits, as a JSON object if the log is JSON.
pub(crate) fn print_failure(message: &str) {
    let line = match STARTED.get() {
        Some(LogFormat::Json) => {
            let mut fields = Fields::default();
            fields.0.insert("message".to_owned(), message.into());
            fields.into_json(&Level::ERROR)
        }
        _ => format!("graphile-worker: {message}"),
    };
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Writes a line for each event.
struct Lines {
    format: LogFormat,
    colours: bool,
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Lines {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        span.extensions_mut().insert(fields);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(fields) = span.extensions_mut().get_mut::<Fields>() {
            values.record(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        for span in context.event_scope(event).into_iter().flatten().collect::<Vec<_>>().into_iter().rev() {
            if let Some(of_span) = span.extensions().get::<Fields>() {
                fields.0.extend(of_span.0.clone());
            }
        }
        event.record(&mut fields);
        let mut line = match self.format {
            LogFormat::Json => fields.into_json(event.metadata().level()),
            LogFormat::Text => fields.into_text(event.metadata().level(), event.metadata().target(), self.colours),
        };
        line.push('\n');
        // Jobs must run even if the reader of standard error is gone.
        let _ = std::io::stderr().lock().write_all(line.as_bytes());
    }
}

/// The fields of an event and its spans, the message included.
#[derive(Default)]
struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.set(field, list_of_strings(&format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.set(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field, value.into());
    }

    fn record_error(&mut self, field: &Field, value: &(dyn Error + 'static)) {
        self.set(field, crate::failure::explain(value).into());
    }
}

impl Fields {
    fn set(&mut self, field: &Field, value: Value) {
        self.0.insert(field.name().to_owned(), value);
    }

    fn into_json(mut self, level: &Level) -> String {
        let mut line = Map::new();
        line.insert("time".to_owned(), Utc::now().to_rfc3339_opts(SecondsFormat::Millis, true).into());
        line.insert("level".to_owned(), level.as_str().into());
        line.insert("message".to_owned(), self.take("message").into());
        for (name, value) in self.0 {
            line.entry(name).or_insert(value);
        }
        Value::Object(line).to_string()
    }

    /// `[scope] LEVEL: message (fields, duration): error`
    fn into_text(mut self, level: &Level, target: &str, colours: bool) -> String {
        let scope = sanitize_line(&self.scope(target));
        let mut rest = self.take("message");
        let error = self.take("error");
        let details: Vec<String> = self.0.iter().map(|(name, value)| detail(name, value)).collect();
        if !details.is_empty() {
            let _ = write!(rest, " ({})", details.join(", "));
        }
        if !error.is_empty() {
            let _ = write!(rest, ": {error}");
        }
        let rest = sanitize_line(&rest);
        match (colours, colour(level)) {
            (true, Some(colour)) => format!("[{scope}] \x1b[{colour}m{level}\x1b[0m: {rest}"),
            _ => format!("[{scope}] {level}: {rest}"),
        }
    }

    /// The scope: `job ID TASK`, `worker ID` with a short id, as in tables, or `core`. Fields that it does not show
    /// stay in the list of fields.
    fn scope(&mut self, target: &str) -> String {
        let label = self.take("label");
        match (label.as_str(), self.0.contains_key("worker_id")) {
            ("job" | "task", true) if self.0.contains_key("job_id") => {
                self.take("worker_id");
                format!("{label} {} {}", self.take("job_id"), self.take("task_identifier"))
            }
            ("", _) if target.starts_with("graphile_worker") => "core".to_owned(),
            ("", _) => target.to_owned(),
            (_, true) => format!("{label} {}", short_worker_id(&self.take("worker_id"))),
            (_, false) => label,
        }
    }

    /// Removes a field and returns its text, or an empty text if there is no such field.
    fn take(&mut self, name: &str) -> String {
        match self.0.remove(name) {
            Some(Value::String(text)) => text,
            Some(value) => value.to_string(),
            None => String::new(),
        }
    }
}

/// Turns the `Debug` output of a set or list of strings into a JSON array, and any other into a JSON string.
fn list_of_strings(debug: &str) -> Value {
    let inner = [('{', '}'), ('[', ']')]
        .into_iter()
        .find_map(|(opens, closes)| debug.strip_prefix(opens)?.strip_suffix(closes));
    let texts = inner.and_then(|inner| serde_json::from_str::<Vec<String>>(&format!("[{inner}]")).ok());
    texts.map_or_else(|| debug.into(), Value::from)
}

fn detail(name: &str, value: &Value) -> String {
    match (name, value) {
        ("ms", value) => format!("{value}ms"),
        (name, Value::String(text)) => format!("{name}: {text}"),
        (name, Value::Array(texts)) => {
            let texts: Vec<&str> = texts.iter().filter_map(Value::as_str).collect();
            format!("{name}: {}", if texts.is_empty() { "none".to_owned() } else { texts.join(", ") })
        }
        (name, value) => format!("{name}: {value}"),
    }
}

fn colour(level: &Level) -> Option<u8> {
    match *level {
        Level::ERROR => Some(31),
        Level::WARN => Some(33),
        Level::DEBUG | Level::TRACE => Some(2),
        _ => None,
    }
}

/// Indents continuation lines and replaces control characters, so that the output of a task cannot control the
/// terminal.
fn sanitize_line(line: &str) -> String {
    let mut sanitize_line = String::with_capacity(line.len());
    for c in line.chars() {
        match c {
            '\n' => sanitize_line.push_str("\n    "),
            '\t' => sanitize_line.push(c),
            c if c.is_control() => sanitize_line.push('\u{fffd}'),
            c => sanitize_line.push(c),
        }
    }
    sanitize_line
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(value: Value) -> Fields {
        let Value::Object(fields) = value else { panic!("an object was expected") };
        Fields(fields)
    }

    #[test]
    fn text_lines_have_scope_level_message_fields_and_error() {
        let job = json!({"label": "job", "worker_id": "w1", "task_identifier": "send_email", "job_id": 42});
        let with = |more: Value| {
            let mut all = fields(job.clone());
            all.0.extend(fields(more).0);
            all
        };
        for (fields, level, line) in [
            (
                with(json!({"message": "job completed", "ms": 0.16})),
                Level::INFO,
                "[job 42 send_email] INFO: job completed (0.16ms)",
            ),
            (
                with(json!({"message": "job failed", "ms": 3.5, "attempts": 1, "error": "no\nwonder"})),
                Level::WARN,
                "[job 42 send_email] WARN: job failed (attempts: 1, 3.5ms): no\n    wonder",
            ),
            (
                fields(json!({"label": "worker", "worker_id": "w1", "message": "stopping"})),
                Level::INFO,
                "[worker w1] INFO: stopping",
            ),
            (fields(json!({"label": "cron", "message": "again"})), Level::INFO, "[cron] INFO: again"),
            (
                fields(json!({"label": "worker", "message": "task changed", "task_identifier": "t"})),
                Level::INFO,
                "[worker] INFO: task changed (task_identifier: t)",
            ),
            (
                fields(json!({"label": "recovery", "message": "job recovered", "job_id": 7, "from": "w0"})),
                Level::WARN,
                "[recovery] WARN: job recovered (from: w0, job_id: 7)",
            ),
            (
                fields(json!({"label": "worker", "worker_id": "w1", "message": "polling", "tasks": ["a", "b/c"]})),
                Level::INFO,
                "[worker w1] INFO: polling (tasks: a, b/c)",
            ),
            (fields(json!({"message": "schema installed"})), Level::INFO, "[core] INFO: schema installed"),
        ] {
            assert_eq!(fields.into_text(&level, "graphile_worker::migrate", false), line);
        }
    }

    #[test]
    fn only_lists_of_strings_become_arrays() {
        let tasks = std::collections::BTreeSet::from(["a", "b \"c\""]);
        assert_eq!(list_of_strings(&format!("{tasks:?}")), json!(["a", "b \"c\""]));
        assert_eq!(list_of_strings("{}"), json!([]));
        for text in ["{\"a\": 1}", "Some(1)", "{unknown}"] {
            assert_eq!(list_of_strings(text), json!(text));
        }
    }

    #[test]
    fn task_output_cannot_control_the_terminal() {
        let line = fields(json!({"message": "\x1b[2Jgone\r"})).into_text(&Level::WARN, "graphile_worker", true);
        assert_eq!(line, "[core] \x1b[33mWARN\x1b[0m: \u{fffd}[2Jgone\u{fffd}");
    }

    #[test]
    fn json_lines_have_time_level_and_message() {
        let line = fields(json!({"message": "job completed", "job_id": 42})).into_json(&Level::INFO);
        let line: Value = serde_json::from_str(&line).expect("an object");
        assert_eq!(line["message"], "job completed");
        assert_eq!((&line["level"], &line["job_id"]), (&json!("INFO"), &json!(42)));
        assert!(line["time"].as_str().is_some_and(|time| time.ends_with('Z')));
    }
}
