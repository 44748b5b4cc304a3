//! Merges the settings: options override the environment, which overrides the configuration file, which overrides the
//! defaults. `connection` chooses the database; the library checks the values.

use crate::arguments::{self, GlobalArguments, RunArguments};
use crate::failure::Failure;
use crate::log::LogFormat;
use graphile_worker::{Limit, WorkerOptions};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The configuration file. Its keys are the names of the options.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct ConfigFile {
    pub(crate) connection: Option<String>,
    pub(crate) password_command: Option<String>,
    pub(crate) schema: Option<String>,
    pub(crate) log_format: Option<LogFormat>,
    tasks: Option<PathBuf>,
    node: Option<PathBuf>,
    python: Option<PathBuf>,
    crontab: Option<PathBuf>,
    watch: Option<bool>,
    jobs: Option<usize>,
    repeatable: Option<Vec<String>>,
    max_pool_size: Option<u32>,
    poll_interval: Option<u64>,
    direct_connection: Option<String>,
    no_prepared_statements: Option<bool>,
    grace_period: Option<u64>,
    max_migration_wait: Option<u64>,
    startup_timeout: Option<u64>,
    answer_timeout: Option<u64>,
    no_recovery: Option<bool>,
    #[serde(default)]
    limits: BTreeMap<String, LimitTable>,
}

/// A table such as `[limits."task:send_email"]`. Its keys are the options of `limit set`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitTable {
    concurrency: Option<u32>,
    #[serde(default, deserialize_with = "rate")]
    rate: Option<(u32, Duration)>,
    burst: Option<u32>,
    weight: Option<f64>,
    cost: Option<u32>,
    group: Option<String>,
    trip: Option<u32>,
    #[serde(default, deserialize_with = "duration")]
    trip_for: Option<Duration>,
}

fn duration<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(value)?;
    let wrong = |problem| serde::de::Error::custom(format!("trip_for is {text:?}, {problem}"));
    arguments::duration(&text).map(Some).map_err(wrong)
}

fn rate<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<(u32, Duration)>, D::Error> {
    let text = String::deserialize(value)?;
    let wrong = |problem| serde::de::Error::custom(format!("rate is {text:?}, {problem}"));
    arguments::rate(&text).map(Some).map_err(wrong)
}

impl LimitTable {
    fn limit(&self, name: &str) -> Limit {
        let mut limit = Limit::named(name);
        if let Some(jobs) = self.concurrency {
            limit = limit.concurrency(jobs);
        }
        if let Some((jobs, period)) = self.rate {
            limit = limit.rate(jobs, period);
        }
        if let Some(jobs) = self.burst {
            limit = limit.burst(jobs);
        }
        if let Some(weight) = self.weight {
            limit = limit.weight(weight);
        }
        if let Some(cost) = self.cost {
            limit = limit.cost(cost);
        }
        if let Some(group) = &self.group {
            limit = limit.in_group(group);
        }
        if let Some(failures) = self.trip {
            limit = limit.trip(failures);
        }
        if let Some(pause) = self.trip_for {
            limit = limit.trip_for(pause);
        }
        limit
    }
}

impl ConfigFile {
    /// Reads the file, or returns empty settings if no file was named.
    pub(crate) fn read(path: Option<&Path>) -> Result<ConfigFile, Failure> {
        let Some(path) = path else { return Ok(ConfigFile::default()) };
        let wrong = |problem: String| Failure::Usage(format!("configuration file {}: {problem}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| wrong(format!("could not read it: {error}")))?;
        let mut file = ConfigFile::parse(&text).map_err(wrong)?;
        for limit in file.limits() {
            limit.check().map_err(|error| wrong(format!("limits.{:?}: {error}", limit.name())))?;
        }
        // Paths are relative to the file, not to the current folder.
        let folder = path.parent().unwrap_or(Path::new(""));
        for relative in [&mut file.tasks, &mut file.crontab].into_iter().flatten() {
            *relative = folder.join(&relative);
        }
        // A program name without a folder is found on the PATH.
        for program in [&mut file.node, &mut file.python].into_iter().flatten() {
            if program.components().count() > 1 {
                *program = folder.join(&program);
            }
        }
        Ok(file)
    }

    fn limits(&self) -> Vec<Limit> {
        self.limits.iter().map(|(name, table)| table.limit(name)).collect()
    }

    /// Parses the file. The parser's own message quotes the line, which may contain a password, so an error has only
    /// the reason and the line number.
    fn parse(text: &str) -> Result<ConfigFile, String> {
        toml::from_str(text).map_err(|error: toml::de::Error| {
            let start = error.span().map_or(0, |span| span.start.min(text.len()));
            let line = text.as_bytes()[..start].iter().filter(|byte| **byte == b'\n').count() + 1;
            let key = text.lines().nth(line - 1).and_then(|line| line.split_once('=')).map(|(key, _)| key.trim());
            format!("line {line}: {}", in_plain_words(&error.message().replace('\n', " "), key))
        })
    }
}

/// Rewrites the parser's message about a value of the wrong type: adds the key, and removes the names of Rust types.
fn in_plain_words(message: &str, key: Option<&str>) -> String {
    let wrong = message.strip_prefix("invalid type: ").or_else(|| message.strip_prefix("invalid value: "));
    let (Some((found, wanted)), Some(key)) = (wrong.and_then(|wrong| wrong.rsplit_once(", expected ")), key) else {
        return message.to_owned();
    };
    let wanted = match wanted {
        "usize" | "u32" | "u64" => "a whole number (0 or more)",
        "a boolean" => "true or false",
        "f64" => "a number",
        "a string" | "path string" => "a quoted string",
        wanted => wanted,
    };
    format!("{key} is {}, expected {wanted}", found.replace('`', ""))
}

/// How to run jobs.
#[derive(Debug, PartialEq)]
pub(crate) struct RunSettings {
    pub(crate) tasks: PathSetting,
    pub(crate) crontab: PathSetting,
    pub(crate) node: Option<PathBuf>,
    pub(crate) python: Option<PathBuf>,
    pub(crate) once: bool,
    pub(crate) watch: bool,
    pub(crate) jobs: Option<usize>,
    pub(crate) repeatable: Vec<String>,
    pub(crate) max_pool_size: u32,
    pub(crate) poll_interval: Option<Duration>,
    pub(crate) direct_connection: Option<String>,
    pub(crate) no_prepared_statements: bool,
    pub(crate) grace_period: Option<Duration>,
    pub(crate) max_migration_wait: Option<Duration>,
    pub(crate) startup_timeout: Option<Duration>,
    pub(crate) answer_timeout: Option<Duration>,
    pub(crate) no_recovery: bool,
    pub(crate) limits: Vec<Limit>,
}

/// A path that the user set, or the default path.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PathSetting {
    /// It must exist.
    Explicit(PathBuf),
    /// It may be missing.
    Default(PathBuf),
}

impl PathSetting {
    fn or_default(path: Option<PathBuf>, default: &str) -> PathSetting {
        path.map_or_else(|| PathSetting::Default(default.into()), PathSetting::Explicit)
    }

    pub(crate) fn is_default(&self) -> bool {
        matches!(self, PathSetting::Default(_))
    }

    pub(crate) fn path(&self) -> &Path {
        let (PathSetting::Explicit(path) | PathSetting::Default(path)) = self;
        path
    }
}

impl RunSettings {
    /// Merges the options (clap has added the environment to them) with the file. A value that
    /// stays `None` leaves the application's option as it is.
    pub(crate) fn new(flags: RunArguments, file: ConfigFile) -> Result<RunSettings, Failure> {
        let at_least_one = |name: &str, value: Option<u64>| match value {
            Some(0) => Err(Failure::Usage(format!("{name} must be at least 1, got 0"))),
            _ => Ok(()),
        };
        let limits = file.limits();
        let jobs = flags.jobs.or(file.jobs);
        let max_pool_size = flags.max_pool_size.or(file.max_pool_size).unwrap_or(10);
        let poll_interval = flags.poll_interval.or(file.poll_interval);
        at_least_one("jobs", jobs.map(|jobs| jobs as u64))?;
        at_least_one("max-pool-size", Some(max_pool_size.into()))?;
        let answer_timeout = flags.answer_timeout.or(file.answer_timeout);
        at_least_one("poll-interval", poll_interval)?;
        at_least_one("answer-timeout", answer_timeout)?;
        Ok(RunSettings {
            tasks: PathSetting::or_default(flags.tasks.or(file.tasks), "tasks"),
            crontab: PathSetting::or_default(flags.crontab.or(file.crontab), "crontab"),
            node: flags.node.or(file.node),
            python: flags.python.or(file.python),
            once: flags.once,
            watch: flags.watch || file.watch.unwrap_or(false),
            jobs,
            repeatable: flags.repeatable.or(file.repeatable).unwrap_or_default(),
            max_pool_size,
            poll_interval: poll_interval.map(Duration::from_millis),
            direct_connection: flags.direct_connection.or(file.direct_connection),
            no_prepared_statements: flags.no_prepared_statements || file.no_prepared_statements.unwrap_or(false),
            grace_period: flags.grace_period.or(file.grace_period).map(Duration::from_secs),
            max_migration_wait: flags.max_migration_wait.or(file.max_migration_wait).map(Duration::from_secs),
            startup_timeout: flags.startup_timeout.or(file.startup_timeout).map(Duration::from_secs),
            answer_timeout: answer_timeout.map(Duration::from_secs),
            no_recovery: flags.no_recovery || file.no_recovery.unwrap_or(false),
            limits,
        })
    }
}

/// The schema, from the option or its variable, else the configuration file, else the application.
pub(crate) fn schema(flags: &GlobalArguments, file: &ConfigFile, application: &WorkerOptions) -> String {
    let schema = flags.schema.as_deref().or(file.schema.as_deref());
    schema.unwrap_or_else(|| application.schema_name()).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_override_the_file_and_the_file_overrides_defaults() {
        let file = ConfigFile::parse("jobs = 4\npoll-interval = 500\nno-recovery = true").expect("a file");
        let flags = RunArguments { jobs: Some(9), ..RunArguments::default() };
        let settings = RunSettings::new(flags, file).expect("settings");
        assert_eq!((settings.jobs, settings.poll_interval), (Some(9), Some(Duration::from_millis(500))));
        assert_eq!((settings.max_pool_size, settings.no_recovery), (10, true));
        assert_eq!(settings.tasks, PathSetting::Default("tasks".into()));
    }

    #[test]
    fn config_errors_have_a_line_number_and_no_secrets() {
        for (text, message) in [
            ("jobs = 4\njbos = 5", "line 2: unknown field `jbos`, expected one of `connection`"),
            ("jobs = \"four\"", "line 1: jobs is string \"four\", expected a whole number (0 or more)"),
            ("watch = 1", "line 1: watch is integer 1, expected true or false"),
            ("schema = 1", "line 1: schema is integer 1, expected a quoted string"),
            (
                "[limits.\"task:t\"]\nconcurrency = 5\nrate = \"100\"",
                "line 3: rate is \"100\", expected a number and a period",
            ),
            ("[limits.\"task:t\"]\nconcurrency = -5", "line 2: concurrency is integer -5, expected a whole number"),
            (
                "[limits.\"task:t\"]\ntrip_for = \"soon\"",
                "line 2: trip_for is \"soon\", expected a duration such as 90s",
            ),
            ("[limits.\"task:t\"]\nspeed = 5", "line 2: unknown field `speed`"),
            ("\njobs = -1", "line 2: jobs is integer -1, expected a whole number (0 or more)"),
            ("\n\nconnection = postgres://u:secret@host/db", "line 3: "),
        ] {
            let error = ConfigFile::parse(text).expect_err("an invalid file");
            assert!(error.starts_with(message), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
