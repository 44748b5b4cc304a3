//! What the command line accepts: every command, every flag, its default and its words in `--help`.
//! What a flag, the environment and the configuration file make together is decided in `settings`.

use crate::crontab::CrontabCommand;
use crate::failure::Failure;
use crate::log::LogFormat;
use crate::operate;
use chrono::{DateTime, NaiveDate, NaiveDateTime, Utc};
use clap::error::{ContextKind, ErrorKind};
use clap::parser::ValueSource;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use std::num::{IntErrorKind, ParseIntError};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// A job queue on the PostgreSQL you already have.
///
/// Without a command it runs jobs: those of the files in the folder `tasks`, in JavaScript, TypeScript, Python or whatever is
/// executable, and what the file `crontab` says.
#[derive(Debug, Parser)]
#[command(name = "graphile-worker", version, max_term_width = 100, after_help = AFTER_HELP)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) global: GlobalArguments,

    #[command(flatten)]
    pub(crate) run: RunArguments,

    #[command(flatten)]
    pub(crate) tidy: TidyArguments,

    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

const AFTER_HELP: &str = "\
The database is that of -c; else of DATABASE_URL; else of PGDATABASE with PGHOST, PGPORT, PGUSER, PGPASSWORD and their \
like; else of the configuration file. A password behind -c leaves the command line as soon as the program has started, but \
shells remember it: better keep it in DATABASE_URL, PGPASSWORD, ~/.pgpass or the configuration file.

Exit codes: 0 done (also after a clean stop by a signal), 1 failed, 2 wrong usage, 57 left because a newer release takes over \
the schema, 128 + n ended at once by a signal n.";

/// For every command.
#[derive(Debug, Args)]
#[command(next_help_heading = "Database and output")]
pub(crate) struct GlobalArguments {
    /// Database connection string, such as postgres://user@host:5432/database, or the name of a database [env: DATABASE_URL]
    #[arg(short, long, value_name = "URL", global = true)]
    pub(crate) connection: Option<String>,

    /// The database schema in which Graphile Worker is (to be) located [default: graphile_worker]
    #[arg(short, long, value_name = "NAME", global = true, env = "GRAPHILE_WORKER_SCHEMA", hide_env_values = true)]
    pub(crate) schema: Option<String>,

    /// A file in TOML that says what is not said here, with the names of these flags as keys
    #[arg(long, value_name = "FILE", global = true, env = "GRAPHILE_WORKER_CONFIG", hide_env_values = true)]
    pub(crate) config: Option<PathBuf>,

    /// How log lines look, on standard error [default: text]
    #[arg(long, value_name = "FORMAT", global = true, env = "GRAPHILE_WORKER_LOG_FORMAT", hide_env_values = true)]
    pub(crate) log_format: Option<LogFormat>,
}

/// For the database, instead of running jobs.
#[derive(Debug, Args)]
#[command(next_help_heading = "Instead of running jobs")]
pub(crate) struct TidyArguments {
    /// Just install (or update) the database schema, then exit
    #[arg(long, conflicts_with_all = ["once", "watch", "cleanup"])]
    pub(crate) schema_only: bool,

    /// Delete what is not needed any more, then exit; several with commas between them
    #[arg(long, value_name = "TASKS", value_delimiter = ',', ignore_case = true, conflicts_with_all = ["once", "watch"])]
    pub(crate) cleanup: Option<Vec<Cleanup>>,
}

/// For running jobs.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Running jobs")]
pub(crate) struct RunArguments {
    /// Run until there are no runnable jobs left, then exit
    #[arg(long, conflicts_with = "watch")]
    pub(crate) once: bool,

    /// Notice when tasks or the crontab change, without a restart
    #[arg(short, long)]
    pub(crate) watch: bool,

    /// The folder of tasks [default: tasks]
    #[arg(long, value_name = "DIR", env = "GRAPHILE_WORKER_TASKS", hide_env_values = true)]
    pub(crate) tasks: Option<PathBuf>,

    /// The Node that runs tasks in JavaScript and TypeScript [default: `node` on the PATH]
    #[arg(long, value_name = "PROGRAM", env = "GRAPHILE_WORKER_NODE", hide_env_values = true)]
    pub(crate) node: Option<PathBuf>,

    /// The Python that runs tasks in Python [default: that of the virtual environment, else `python3` on the PATH]
    #[arg(long, value_name = "PROGRAM", env = "GRAPHILE_WORKER_PYTHON", hide_env_values = true)]
    pub(crate) python: Option<PathBuf>,

    /// The crontab [default: the file `crontab`, if there is one]
    #[arg(long, value_name = "FILE", env = "GRAPHILE_WORKER_CRONTAB", hide_env_values = true)]
    pub(crate) crontab: Option<PathBuf>,

    /// How many jobs run at the same time [default: 1]
    #[arg(short, long, value_name = "N", env = "GRAPHILE_WORKER_JOBS", hide_env_values = true, value_parser = whole::<usize>)]
    pub(crate) jobs: Option<usize>,

    /// How many connections the tasks' pool may have; the worker's own two to six are not among them [default: 10]
    #[arg(short, long, value_name = "N", env = "GRAPHILE_WORKER_MAX_POOL_SIZE", hide_env_values = true, value_parser = whole::<u32>)]
    pub(crate) max_pool_size: Option<u32>,

    /// How long to wait between polling for jobs, in milliseconds [default: 2000]
    #[arg(long, value_name = "MS", env = "GRAPHILE_WORKER_POLL_INTERVAL", hide_env_values = true, value_parser = whole::<u64>)]
    pub(crate) poll_interval: Option<u64>,

    /// Do not keep prepared statements, e.g. for PgBouncer
    #[arg(long)]
    pub(crate) no_prepared_statements: bool,

    /// How many seconds running jobs may take to end when the worker is told to stop [default: 5]
    #[arg(long, value_name = "SECONDS", env = "GRAPHILE_WORKER_GRACE_PERIOD", hide_env_values = true, value_parser = whole::<u64>)]
    pub(crate) grace_period: Option<u64>,

    /// How many seconds to wait for workers of older releases to finish, where the schema changes under them [default: 600]
    #[arg(long, value_name = "SECONDS", env = "GRAPHILE_WORKER_MAX_MIGRATION_WAIT", hide_env_values = true, value_parser = whole::<u64>)]
    pub(crate) max_migration_wait: Option<u64>,

    /// How many seconds to retry at start if the database is not ready; 0: try once [default: 30]
    #[arg(long, value_name = "SECONDS", env = "GRAPHILE_WORKER_STARTUP_TIMEOUT", hide_env_values = true, value_parser = whole::<u64>)]
    pub(crate) startup_timeout: Option<u64>,

    /// Do not register, nor free the jobs of workers that have died
    #[arg(long)]
    pub(crate) no_recovery: bool,
}

/// What `--cleanup` can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "SCREAMING_SNAKE_CASE")]
pub(crate) enum Cleanup {
    // Tasks that no job belongs to.
    GcTaskIdentifiers,
    // Queues that no job belongs to.
    GcJobQueues,
    // Jobs that have failed for good.
    DeletePermafailedJobs,
}

/// What to do instead of running jobs.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start a private PostgreSQL in ./.graphile-worker and run jobs on it: nothing to configure
    Dev(DevArguments),

    /// Check crontabs, or see when they fire
    #[command(subcommand)]
    Crontab(CrontabCommand),

    #[command(flatten)]
    Operate(operate::Command),

    /// Print a script that completes this command line in a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },

    /// Print the manual page
    Man,
}

/// For `dev`.
#[derive(Debug, Args)]
pub(crate) struct DevArguments {
    /// Throw away the data of earlier runs
    #[arg(long)]
    pub(crate) reset: bool,

    #[command(flatten)]
    pub(crate) run: RunArguments,
}

/// A whole number.
pub(crate) fn whole<T: FromStr<Err = ParseIntError>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: ParseIntError| match error.kind() {
        IntErrorKind::PosOverflow => "too large a number".to_owned(),
        IntErrorKind::NegOverflow => "too small a number".to_owned(),
        _ => "expected a whole number".to_owned(),
    })
}

/// A whole number of two bytes, as priorities and attempts are.
pub(crate) fn small(text: &str) -> Result<i16, String> {
    text.parse().map_err(|_| format!("expected a whole number from {} to {}", i16::MIN, i16::MAX))
}

/// A whole number that is not 0.
pub(crate) fn at_least_one(text: &str) -> Result<usize, String> {
    match whole(text)? {
        0 => Err("expected at least 1".to_owned()),
        number => Ok(number),
    }
}

/// A length of time.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|_| "expected a length of time such as 90s, 10m or \"1h 30m\"".to_owned())
}

/// The id of a job.
pub(crate) fn job_id(text: &str) -> Result<i64, String> {
    text.parse().map_err(|_| "expected the id of a job, a number".to_owned())
}

/// A time; without a zone it is UTC, without a time of day midnight.
pub(crate) fn time(text: &str) -> Result<DateTime<Utc>, String> {
    let text = text.trim();
    let local = |format| NaiveDateTime::parse_from_str(text, format).ok();
    let midnight = || NaiveDate::parse_from_str(text, "%Y-%m-%d").ok()?.and_hms_opt(0, 0, 0);
    let without_zone = || {
        let formats = ["%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%dT%H:%M"];
        formats.into_iter().find_map(local).or_else(midnight).map(|time| time.and_utc())
    };
    let time = text.parse().ok().or_else(without_zone);
    time.ok_or_else(|| "expected a time such as 2030-01-31T12:00:00Z".to_owned())
}

/// What there is to do after reading the command line.
pub(crate) enum Read {
    Asked(Box<Arguments>),
    /// `--help` or `--version`, to print.
    Words(String),
}

/// Reads the command line of this process.
pub(crate) fn read() -> Result<Read, Failure> {
    let matches = match Arguments::command().try_get_matches() {
        Ok(matches) => matches,
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            return Ok(Read::Words(error.to_string()));
        }
        Err(error) => return Err(Failure::Usage(in_one_line(&error))),
    };
    let arguments = Arguments::from_arg_matches(&matches).map_err(|error| Failure::Usage(in_one_line(&error)))?;
    if let Some(command) = matches.subcommand_name() {
        refuse_misplaced(&matches, command)?;
    }
    Ok(Read::Asked(Box::new(arguments)))
}

/// A flag for running jobs means nothing to another command; before `dev`, it belongs behind it.
fn refuse_misplaced(matches: &clap::ArgMatches, command: &str) -> Result<(), Failure> {
    let of_run = TidyArguments::augment_args(RunArguments::augment_args(clap::Command::new("run")));
    let misplaced = of_run
        .get_arguments()
        .find(|argument| matches.value_source(argument.get_id().as_str()) == Some(ValueSource::CommandLine));
    let Some(flag) = misplaced.and_then(clap::Arg::get_long) else { return Ok(()) };
    Err(Failure::Usage(match command {
        "dev" => format!("--{flag} is before `dev`, expected behind it: graphile-worker dev --{flag}"),
        _ => format!("--{flag} is for running jobs, which `{command}` does not"),
    }))
}

/// Clap explains at length; what comes before the usage says what is wrong, and often what was meant.
fn in_one_line(error: &clap::Error) -> String {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return missing_subcommand();
    }
    let text = error.to_string();
    if quotes_a_connection(&text, &given()) {
        // It quotes what it found, and what it found has a password in it.
        return "there is a connection string where none was expected: it goes behind -c".to_owned();
    }
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let mut explanation = String::new();
    for line in lines.filter(|line| !line.is_empty() && !line.starts_with("For more information")) {
        match line.strip_prefix("tip: ") {
            Some(tip) => explanation.push_str(&meant(tip)),
            None if explanation.is_empty() => explanation.push_str(line.trim_start_matches("error: ")),
            None => {
                explanation.push(' ');
                explanation.push_str(line);
            }
        }
    }
    match variable(error) {
        Some((argument, name)) => {
            explanation.replacen(&format!("for '{argument}'"), &format!("for '{argument}' in {name}"), 1)
        }
        None => explanation,
    }
}

/// A tip of clap's, behind what was wrong.
fn meant(tip: &str) -> String {
    match tip.split_once(" exist").and_then(|(_, names)| names.split_once(": ")) {
        Some((_, names)) => format!("; did you mean {}?", names.replace(", ", " or ")),
        None => format!("; {tip}"),
    }
}

/// The only command that has commands itself was given none.
fn missing_subcommand() -> String {
    let command = Arguments::command();
    let above = command.get_subcommands().find(|command| command.is_subcommand_required_set());
    let Some(above) = above else { return "a command is missing".to_owned() };
    let names: Vec<String> = above
        .get_subcommands()
        .filter(|below| below.get_name() != "help")
        .map(|below| format!("`{}`", below.get_name()))
        .collect();
    format!("`{}` needs {} behind it", above.get_name(), names.join(" or "))
}

/// What clap may quote: the arguments of this process, and what its environment says for flags.
fn given() -> Vec<String> {
    let arguments = std::env::args_os().skip(1);
    let variables = std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("GRAPHILE_WORKER_"));
    arguments.chain(variables.map(|(_, value)| value)).map(|value| value.to_string_lossy().into_owned()).collect()
}

/// Whether a word of this text comes from what was given and might be (part of) a connection string. Help has examples of
/// them, which are no secret.
fn quotes_a_connection(text: &str, given: &[String]) -> bool {
    let suspicious = |word: &&str| word.contains("://") || word.contains('@');
    let words = text.split(|c: char| c.is_whitespace() || "'\"`,".contains(c));
    words.filter(suspicious).any(|word| given.iter().any(|given| given.contains(word)))
}

/// The flag whose value is wrong and the variable that it came from, if it did.
fn variable(error: &clap::Error) -> Option<(String, String)> {
    let argument = error.get(ContextKind::InvalidArg)?.to_string();
    let value = error.get(ContextKind::InvalidValue)?.to_string();
    let flag = argument.split_whitespace().next()?.strip_prefix("--")?;
    let command = Arguments::command();
    let name = command.get_arguments().find(|known| known.get_long() == Some(flag))?.get_env()?;
    let is_from_there = std::env::var(name).is_ok_and(|set| set == value);
    let is_on_the_line = std::env::args().skip(1).any(|argument| argument.ends_with(&value));
    (is_from_there && !is_on_the_line).then(|| (argument.clone(), name.to_string_lossy().into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn a_time_may_lack_its_zone_and_its_hours() {
        for (text, time_in_full) in [
            ("2030-01-31T12:00:00Z", "2030-01-31T12:00:00Z"),
            ("2030-01-31T12:00:00+02:00", "2030-01-31T10:00:00Z"),
            ("2030-01-31 12:30", "2030-01-31T12:30:00Z"),
            ("2030-01-31 12:30:05", "2030-01-31T12:30:05Z"),
            ("2030-01-31", "2030-01-31T00:00:00Z"),
        ] {
            let wanted: DateTime<Utc> = time_in_full.parse().expect("a time");
            assert_eq!(time(text), Ok(wanted), "{text}");
        }
        for text in ["tomorrow", "2030-02-31", "", "2030-01-31 25:00"] {
            assert_eq!(time(text), Err("expected a time such as 2030-01-31T12:00:00Z".to_owned()), "{text}");
        }
    }

    #[test]
    fn only_what_was_given_is_a_connection_string() {
        let given = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let help = "-c <URL> such as postgres://user@host:5432/database";
        assert!(!quotes_a_connection(help, &given(&["crontab"])));
        for argument in ["postgres://u:p@h/d", "--jobs=postgres://u:p@h/d", "-jpostgres://u:p@h/d"] {
            assert!(quotes_a_connection("invalid value 'postgres://u:p@h/d' for '--jobs'", &given(&[argument])));
        }
        assert!(quotes_a_connection("unrecognized subcommand 'u:two words@h'", &given(&["u:two words@h"])));
    }
}
