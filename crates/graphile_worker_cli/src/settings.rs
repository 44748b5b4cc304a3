//! What is set: flags win over the environment, the environment over the configuration file, the file over defaults.

use crate::arguments::{GlobalArguments, RunArguments};
use crate::failure::Failure;
use crate::log::LogFormat;
use graphile_worker::WorkerOptions;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The configuration file. Its keys are the names of the flags.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct ConfigFile {
    pub(crate) connection: Option<String>,
    pub(crate) schema: Option<String>,
    pub(crate) log_format: Option<LogFormat>,
    tasks: Option<PathBuf>,
    node: Option<PathBuf>,
    python: Option<PathBuf>,
    crontab: Option<PathBuf>,
    watch: Option<bool>,
    jobs: Option<usize>,
    max_pool_size: Option<u32>,
    poll_interval: Option<u64>,
    no_prepared_statements: Option<bool>,
    grace_period: Option<u64>,
    max_migration_wait: Option<u64>,
    startup_timeout: Option<u64>,
    no_recovery: Option<bool>,
}

impl ConfigFile {
    /// Reads the file that was asked for; none was: nothing is set.
    pub(crate) fn read(path: Option<&Path>) -> Result<ConfigFile, Failure> {
        let Some(path) = path else { return Ok(ConfigFile::default()) };
        let wrong = |problem: String| Failure::Usage(format!("the configuration file {}: {problem}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| wrong(format!("cannot be read: {error}")))?;
        let mut file = ConfigFile::parse(&text).map_err(wrong)?;
        // Paths in a file are relative to it, so that it means the same wherever one stands.
        let folder = path.parent().unwrap_or(Path::new(""));
        for relative in [&mut file.tasks, &mut file.crontab].into_iter().flatten() {
            *relative = folder.join(&relative);
        }
        // The bare name of a program is looked for on the PATH.
        for program in [&mut file.node, &mut file.python].into_iter().flatten() {
            if program.components().count() > 1 {
                *program = folder.join(&program);
            }
        }
        Ok(file)
    }

    /// The parser's message shows the line it stumbled over, which may be the one with the password: only its words
    /// and its place are told.
    fn parse(text: &str) -> Result<ConfigFile, String> {
        toml::from_str(text).map_err(|error: toml::de::Error| {
            let start = error.span().map_or(0, |span| span.start.min(text.len()));
            let line = text.as_bytes()[..start].iter().filter(|byte| **byte == b'\n').count() + 1;
            let key = text.lines().nth(line - 1).and_then(|line| line.split_once('=')).map(|(key, _)| key.trim());
            format!("line {line}: {}", in_plain_words(&error.message().replace('\n', " "), key))
        })
    }
}

/// What the parser says of a value that is of the wrong kind, with its key and without Rust's types.
fn in_plain_words(message: &str, key: Option<&str>) -> String {
    let wrong = message.strip_prefix("invalid type: ").or_else(|| message.strip_prefix("invalid value: "));
    let (Some((found, wanted)), Some(key)) = (wrong.and_then(|wrong| wrong.rsplit_once(", expected ")), key) else {
        return message.to_owned();
    };
    let wanted = match wanted {
        "usize" | "u32" | "u64" => "a whole number of at least 0",
        "a boolean" => "true or false",
        "a string" | "path string" => "a text in quotes",
        wanted => wanted,
    };
    format!("{key} is {}, expected {wanted}", found.replace('`', ""))
}

/// How to run jobs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RunSettings {
    /// The folder of tasks, and whether somebody named it.
    pub(crate) tasks: Named,
    /// The crontab, and whether somebody named it.
    pub(crate) crontab: Named,
    pub(crate) node: Option<PathBuf>,
    pub(crate) python: Option<PathBuf>,
    pub(crate) once: bool,
    pub(crate) watch: bool,
    pub(crate) jobs: Option<usize>,
    pub(crate) max_pool_size: u32,
    pub(crate) poll_interval: Option<Duration>,
    pub(crate) no_prepared_statements: bool,
    pub(crate) grace_period: Option<Duration>,
    pub(crate) max_migration_wait: Option<Duration>,
    pub(crate) startup_timeout: Option<Duration>,
    pub(crate) no_recovery: bool,
}

/// A path that somebody named, or the usual one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Named {
    /// It must be there.
    By(PathBuf),
    /// It may be missing.
    Usual(PathBuf),
}

impl Named {
    fn or_usual(path: Option<PathBuf>, usual: &str) -> Named {
        path.map_or_else(|| Named::Usual(usual.into()), Named::By)
    }

    pub(crate) fn is_usual(&self) -> bool {
        matches!(self, Named::Usual(_))
    }

    pub(crate) fn path(&self) -> &Path {
        let (Named::By(path) | Named::Usual(path)) = self;
        path
    }
}

impl RunSettings {
    /// Flags and environment (which clap has read) over the file; what nobody says stays open.
    pub(crate) fn new(flags: RunArguments, file: ConfigFile) -> Result<RunSettings, Failure> {
        let at_least_one = |name: &str, value: Option<u64>| match value {
            Some(0) => Err(Failure::Usage(format!("{name} is 0, expected at least 1"))),
            _ => Ok(()),
        };
        let jobs = flags.jobs.or(file.jobs);
        let max_pool_size = flags.max_pool_size.or(file.max_pool_size).unwrap_or(10);
        let poll_interval = flags.poll_interval.or(file.poll_interval);
        at_least_one("jobs", jobs.map(|jobs| jobs as u64))?;
        at_least_one("max-pool-size", Some(max_pool_size.into()))?;
        at_least_one("poll-interval", poll_interval)?;
        Ok(RunSettings {
            tasks: Named::or_usual(flags.tasks.or(file.tasks), "tasks"),
            crontab: Named::or_usual(flags.crontab.or(file.crontab), "crontab"),
            node: flags.node.or(file.node),
            python: flags.python.or(file.python),
            once: flags.once,
            watch: flags.watch || file.watch.unwrap_or(false),
            jobs,
            max_pool_size,
            poll_interval: poll_interval.map(Duration::from_millis),
            no_prepared_statements: flags.no_prepared_statements || file.no_prepared_statements.unwrap_or(false),
            grace_period: flags.grace_period.or(file.grace_period).map(Duration::from_secs),
            max_migration_wait: flags.max_migration_wait.or(file.max_migration_wait).map(Duration::from_secs),
            startup_timeout: flags.startup_timeout.or(file.startup_timeout).map(Duration::from_secs),
            no_recovery: flags.no_recovery || file.no_recovery.unwrap_or(false),
        })
    }
}

/// The schema, by flag or environment, by the file, or the application's.
pub(crate) fn schema(flags: &GlobalArguments, file: &ConfigFile, application: &WorkerOptions) -> String {
    let said = flags.schema.as_deref().or(file.schema.as_deref());
    said.unwrap_or_else(|| application.schema_name()).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() {
        let file = ConfigFile::parse("jobs = 4\npoll-interval = 500\nno-recovery = true").expect("a file");
        let flags = RunArguments { jobs: Some(9), ..RunArguments::default() };
        let settings = RunSettings::new(flags, file).expect("settings");
        assert_eq!((settings.jobs, settings.poll_interval), (Some(9), Some(Duration::from_millis(500))));
        assert_eq!((settings.max_pool_size, settings.no_recovery), (10, true));
        assert_eq!(settings.tasks, Named::Usual("tasks".into()));
    }

    #[test]
    fn a_wrong_file_is_told_with_its_line_and_without_what_is_in_it() {
        for (text, message) in [
            ("jobs = 4\njbos = 5", "line 2: unknown field `jbos`, expected one of `connection`"),
            ("jobs = \"four\"", "line 1: jobs is string \"four\", expected a whole number of at least 0"),
            ("watch = 1", "line 1: watch is integer 1, expected true or false"),
            ("schema = 1", "line 1: schema is integer 1, expected a text in quotes"),
            ("\njobs = -1", "line 2: jobs is integer -1, expected a whole number of at least 0"),
            ("\n\nconnection = postgres://u:secret@host/db", "line 3: "),
        ] {
            let error = ConfigFile::parse(text).expect_err("a wrong file");
            assert!(error.starts_with(message), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
