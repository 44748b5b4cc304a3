//! What the command line accepts: every command and option, with its default and its `--help` text.
//! `settings` merges options, environment and configuration file; `operate` declares the operators' commands.

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
/// Without a command, it runs jobs. Each file in the folder `tasks` is a task: JavaScript, TypeScript, Python, or any
/// executable. The file `crontab` lists recurring jobs.
#[derive(Debug, Parser)]
#[command(name = "graphile-worker", version, max_term_width = 100, after_help = AFTER_HELP)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) global: GlobalArguments,

    #[command(flatten)]
    pub(crate) run: RunArguments,

    #[command(flatten)]
    pub(crate) maintenance: MaintenanceArguments,

    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

const AFTER_HELP: &str = "\
The database is the first of these that is set:
  1. -c, --connection
  2. DATABASE_URL
  3. PGDATABASE or PGSERVICE, with PGHOST, PGPORT, PGUSER, PGPASSWORD and the other PG variables
  4. `connection` in the configuration file
  5. the application's own options, if an application embeds this command line
  6. a `graphile-worker dev` that is running in this folder

A password after -c disappears from the process list as soon as the program starts, but your shell may keep it in its \
history. Prefer DATABASE_URL, PGPASSWORD, ~/.pgpass or the configuration file.

Exit codes:
  0        success; for a worker, also a clean stop by a signal
  1        failure
  2        usage error
  57       stopped because a newer release takes over the schema
  128 + n  interrupted by signal n; for a worker, by its second signal";

/// The variable of `--direct-connection`.
pub(crate) const DIRECT_CONNECTION: &str = "GRAPHILE_WORKER_DIRECT_CONNECTION";

/// Options of every command.
#[derive(Debug, Args)]
#[command(next_help_heading = "Database and output")]
pub(crate) struct GlobalArguments {
    /// Connection string, as for psql: postgres://user@host:5432/database, 'host=… dbname=…', or a database name
    /// [env: DATABASE_URL]
    #[arg(short, long, value_name = "URL", global = true)]
    pub(crate) connection: Option<String>,

    /// Shell command that prints the database password; it runs for each new connection, for rotated passwords and
    /// expiring tokens
    #[arg(
        long,
        value_name = "COMMAND",
        global = true,
        env = "GRAPHILE_WORKER_PASSWORD_COMMAND",
        hide_env_values = true
    )]
    pub(crate) password_command: Option<String>,

    /// Database schema of Graphile Worker [default: graphile_worker]
    #[arg(short, long, value_name = "NAME", global = true, env = "GRAPHILE_WORKER_SCHEMA", hide_env_values = true)]
    pub(crate) schema: Option<String>,

    /// TOML configuration file; its keys are the long names of options, such as `jobs = 4`
    #[arg(long, value_name = "FILE", global = true, env = "GRAPHILE_WORKER_CONFIG", hide_env_values = true)]
    pub(crate) config: Option<PathBuf>,

    /// Format of the log on standard error [default: text]
    #[arg(long, value_name = "FORMAT", global = true, env = "GRAPHILE_WORKER_LOG_FORMAT", hide_env_values = true)]
    pub(crate) log_format: Option<LogFormat>,
}

/// Options that maintain the database instead of running jobs.
#[derive(Debug, Args)]
#[command(next_help_heading = "Maintenance, instead of running jobs")]
pub(crate) struct MaintenanceArguments {
    /// Install or update the database schema, then exit
    #[arg(long, conflicts_with_all = ["once", "watch", "cleanup"])]
    pub(crate) schema_only: bool,

    /// Delete tasks without jobs, queues without jobs, or permanently failed jobs, then exit (comma-separated list)
    #[arg(
        long,
        value_name = "TASKS",
        value_delimiter = ',',
        ignore_case = true,
        conflicts_with_all = ["once", "watch"]
    )]
    pub(crate) cleanup: Option<Vec<Cleanup>>,
}

/// Options for running jobs.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Running jobs")]
pub(crate) struct RunArguments {
    /// Run until there are no runnable jobs left, then exit
    #[arg(long, conflicts_with = "watch")]
    pub(crate) once: bool,

    /// Reload tasks and the crontab when they change; always on with `dev`
    #[arg(short, long)]
    pub(crate) watch: bool,

    /// Tasks folder [default: tasks]
    #[arg(long, value_name = "DIR", env = "GRAPHILE_WORKER_TASKS", hide_env_values = true)]
    pub(crate) tasks: Option<PathBuf>,

    /// Node executable for JavaScript and TypeScript tasks [default: `node` on the PATH]
    #[arg(long, value_name = "PROGRAM", env = "GRAPHILE_WORKER_NODE", hide_env_values = true)]
    pub(crate) node: Option<PathBuf>,

    /// Python executable for Python tasks [default: that of VIRTUAL_ENV or .venv, else `python3` on the PATH]
    #[arg(long, value_name = "PROGRAM", env = "GRAPHILE_WORKER_PYTHON", hide_env_values = true)]
    pub(crate) python: Option<PathBuf>,

    /// Crontab file [default: `crontab`, if it exists]
    #[arg(long, value_name = "FILE", env = "GRAPHILE_WORKER_CRONTAB", hide_env_values = true)]
    pub(crate) crontab: Option<PathBuf>,

    /// Number of jobs to run at the same time [default: 1]
    #[arg(
        short,
        long,
        value_name = "N",
        env = "GRAPHILE_WORKER_JOBS",
        hide_env_values = true,
        value_parser = whole::<usize>
    )]
    pub(crate) jobs: Option<usize>,

    /// Tasks that may run twice without harm, separated by commas; `*` stands for any text. Their jobs run faster
    #[arg(
        long,
        value_name = "TASKS",
        env = "GRAPHILE_WORKER_REPEATABLE",
        hide_env_values = true,
        value_delimiter = ','
    )]
    pub(crate) repeatable: Option<Vec<String>>,

    /// Maximum number of connections in the tasks' pool; the worker itself uses two to eight more [default: 10]
    #[arg(
        short,
        long,
        value_name = "N",
        env = "GRAPHILE_WORKER_MAX_POOL_SIZE",
        hide_env_values = true,
        value_parser = whole::<u32>
    )]
    pub(crate) max_pool_size: Option<u32>,

    /// Maximum delay between polls if no notification arrives, in milliseconds [default: 2000]
    #[arg(
        long,
        value_name = "MS",
        env = "GRAPHILE_WORKER_POLL_INTERVAL",
        hide_env_values = true,
        value_parser = whole::<u64>
    )]
    pub(crate) poll_interval: Option<u64>,

    /// Direct connection string, if -c points to a pooler such as PgBouncer; the worker uses it to listen for jobs
    #[arg(long, value_name = "URL", env = DIRECT_CONNECTION, hide_env_values = true)]
    pub(crate) direct_connection: Option<String>,

    /// Disable prepared statements and session settings, for a pooler that the worker does not detect
    #[arg(long)]
    pub(crate) no_prepared_statements: bool,

    /// Seconds that running jobs get to finish after a stop signal [default: 5]
    #[arg(
        long,
        value_name = "SECONDS",
        env = "GRAPHILE_WORKER_GRACE_PERIOD",
        hide_env_values = true,
        value_parser = whole::<u64>
    )]
    pub(crate) grace_period: Option<u64>,

    /// Seconds to wait for workers of older releases to stop before a breaking migration [default: 600]
    #[arg(
        long,
        value_name = "SECONDS",
        env = "GRAPHILE_WORKER_MAX_MIGRATION_WAIT",
        hide_env_values = true,
        value_parser = whole::<u64>
    )]
    pub(crate) max_migration_wait: Option<u64>,

    /// Seconds to keep retrying at start if the database is not ready, or 0 to try once [default: 30]
    #[arg(
        long,
        value_name = "SECONDS",
        env = "GRAPHILE_WORKER_STARTUP_TIMEOUT",
        hide_env_values = true,
        value_parser = whole::<u64>
    )]
    pub(crate) startup_timeout: Option<u64>,

    /// Seconds to wait for the database to answer before a connection counts as dead [default: 20, or tcp_user_timeout
    /// of the connection string]
    #[arg(
        long,
        value_name = "SECONDS",
        env = "GRAPHILE_WORKER_ANSWER_TIMEOUT",
        hide_env_values = true,
        value_parser = whole::<u64>
    )]
    pub(crate) answer_timeout: Option<u64>,

    /// Disable heartbeats and the recovery of dead workers' jobs
    #[arg(long)]
    pub(crate) no_recovery: bool,
}

/// What `--cleanup` and `cleanup` can delete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "SCREAMING_SNAKE_CASE")]
pub(crate) enum Cleanup {
    // Tasks without jobs.
    GcTaskIdentifiers,
    // Queues without jobs.
    GcJobQueues,
    // Permanently failed jobs.
    DeletePermafailedJobs,
}

/// The commands. Without one, the program runs jobs.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run jobs on a private PostgreSQL in ./.graphile-worker; nothing to configure
    Dev(DevArguments),

    /// Check crontabs, or list when they fire
    #[command(subcommand)]
    Crontab(CrontabCommand),

    #[command(flatten)]
    Operate(operate::Command),

    /// Print a shell completion script
    Completions {
        /// Shell
        shell: clap_complete::Shell,
    },

    /// Print the manual page
    Man,
}

/// Options of `dev`.
#[derive(Debug, Args)]
pub(crate) struct DevArguments {
    /// Delete the data of earlier runs first
    #[arg(long)]
    pub(crate) reset: bool,

    #[command(flatten)]
    pub(crate) run: RunArguments,
}

/// Parses a whole number.
pub(crate) fn whole<T: FromStr<Err = ParseIntError>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: ParseIntError| match error.kind() {
        IntErrorKind::PosOverflow => "number too large".to_owned(),
        IntErrorKind::NegOverflow => "number too small".to_owned(),
        _ => "expected a whole number".to_owned(),
    })
}

/// Parses a 16-bit number, the type of priorities and attempts.
pub(crate) fn small(text: &str) -> Result<i16, String> {
    text.parse().map_err(|_| format!("expected a whole number from {} to {}", i16::MIN, i16::MAX))
}

/// Parses a whole number greater than 0.
pub(crate) fn at_least_one(text: &str) -> Result<usize, String> {
    match whole(text)? {
        0 => Err("must be at least 1".to_owned()),
        number => Ok(number),
    }
}

/// Parses a duration.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|_| "expected a duration such as 90s, 10m or \"1h 30m\"".to_owned())
}

/// Parses a rate, such as `100/m` or `5/10s`: a number and a period.
pub(crate) fn rate(text: &str) -> Result<(u32, Duration), String> {
    let wrong = || "expected a number and a period, such as 100/m, 5/10s, 1000/h or 1/day".to_owned();
    let (jobs, period) = text.split_once('/').ok_or_else(wrong)?;
    let jobs = jobs.trim().parse().map_err(|_| wrong())?;
    let period = period.trim();
    let is_unit = period.starts_with(|c: char| c.is_ascii_alphabetic());
    let period = if is_unit { format!("1{period}") } else { period.to_owned() };
    Ok((jobs, humantime::parse_duration(&period).map_err(|_| wrong())?))
}

/// When a pause ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Until {
    Time(DateTime<Utc>),
    /// This long from now.
    After(Duration),
}

/// Parses a time or a duration.
pub(crate) fn until(text: &str) -> Result<Until, String> {
    let after = || humantime::parse_duration(text).map(Until::After);
    let wrong = |_| "expected a time such as 2030-01-31T12:00:00Z, or a duration such as 2h".to_owned();
    time(text).map(Until::Time).or_else(|_| after()).map_err(wrong)
}

/// Parses a job id.
pub(crate) fn job_id(text: &str) -> Result<i64, String> {
    text.parse().map_err(|_| "expected a job id, which is a number".to_owned())
}

/// Parses a time. Without a zone, it is UTC; without a time of day, it is midnight.
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

/// What the command line asks for.
pub(crate) enum ParsedArguments {
    Run(Box<Arguments>),
    /// The text of `--help` or `--version`.
    Print(String),
}

/// Reads the command line of this process.
pub(crate) fn read() -> Result<ParsedArguments, Failure> {
    let matches = match Arguments::command().try_get_matches() {
        Ok(matches) => matches,
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            return Ok(ParsedArguments::Print(error.to_string()));
        }
        Err(error) => return Err(Failure::Usage(one_line_message(&error))),
    };
    let arguments = Arguments::from_arg_matches(&matches).map_err(|error| Failure::Usage(one_line_message(&error)))?;
    if let Some(command) = matches.subcommand_name() {
        reject_misplaced(&matches, command)?;
    }
    Ok(ParsedArguments::Run(Box::new(arguments)))
}

/// Rejects options for running jobs on other commands. Those of `dev` must come after `dev`.
fn reject_misplaced(matches: &clap::ArgMatches, command: &str) -> Result<(), Failure> {
    let of_run = MaintenanceArguments::augment_args(RunArguments::augment_args(clap::Command::new("run")));
    let misplaced = of_run
        .get_arguments()
        .find(|argument| matches.value_source(argument.get_id().as_str()) == Some(ValueSource::CommandLine));
    let Some(flag) = misplaced.and_then(clap::Arg::get_long) else { return Ok(()) };
    Err(Failure::Usage(match command {
        "dev" => format!("--{flag} must come after `dev`: graphile-worker dev --{flag}"),
        _ => format!("--{flag} is for running jobs: remove it, `{command}` does not run any"),
    }))
}

/// Shortens clap's message to one line. The part before the usage says what is wrong, and often suggests a fix.
fn one_line_message(error: &clap::Error) -> String {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return missing_subcommand();
    }
    let text = error.to_string();
    if quotes_a_connection(&text, &user_input()) {
        // Clap quotes the value, which may contain a password.
        return "unexpected connection string: pass it with -c".to_owned();
    }
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let mut explanation = String::new();
    for line in lines.filter(|line| !line.is_empty() && !line.starts_with("For more information")) {
        match line.strip_prefix("tip: ") {
            Some(tip) => explanation.push_str(&suggestion(tip)),
            None if explanation.is_empty() => explanation.push_str(line.trim_start_matches("error: ")),
            None => {
                explanation.push(' ');
                explanation.push_str(line);
            }
        }
    }
    match source_variable(error) {
        Some((argument, name)) => {
            explanation.replacen(&format!("for '{argument}'"), &format!("for '{argument}' in {name}"), 1)
        }
        None => explanation,
    }
}

/// One of clap's tips, as the end of the message.
fn suggestion(tip: &str) -> String {
    match tip.split_once(" exist").and_then(|(_, names)| names.split_once(": ")) {
        Some((_, names)) => format!("; did you mean {}?", names.replace(", ", " or ")),
        None => format!("; {tip}"),
    }
}

/// The message for a command such as `crontab` without its subcommand.
fn missing_subcommand() -> String {
    let command = Arguments::command();
    let is_given = |name: &str| std::env::args().skip(1).any(|argument| argument == name);
    let mut with_subcommands = command.get_subcommands().filter(|command| command.is_subcommand_required_set());
    let above = with_subcommands.find(|command| is_given(command.get_name()));
    let Some(above) = above else { return "a command is missing".to_owned() };
    let names: Vec<String> = above
        .get_subcommands()
        .filter(|below| below.get_name() != "help")
        .map(|below| format!("`{}`", below.get_name()))
        .collect();
    format!("`{}` needs a subcommand: {}", above.get_name(), names.join(" or "))
}

/// What clap may quote: the arguments of this process, and the environment variables of its options.
fn user_input() -> Vec<String> {
    let arguments = std::env::args_os().skip(1);
    let variables = std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("GRAPHILE_WORKER_"));
    arguments.chain(variables.map(|(_, value)| value)).map(|value| value.to_string_lossy().into_owned()).collect()
}

/// Whether this option is on the command line, rather than only in the environment.
pub(crate) fn is_given_as_flag(flag: &str) -> bool {
    std::env::args_os().skip(1).any(|argument| {
        let argument = argument.to_string_lossy();
        argument.strip_prefix(flag).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
    })
}

/// Whether the text quotes a word of the user's input that could be part of a connection string. The examples in
/// `--help` are not secret.
fn quotes_a_connection(text: &str, input: &[String]) -> bool {
    let suspicious = |word: &&str| word.contains("://") || word.contains('@');
    let words = text.split(|c: char| c.is_whitespace() || "'\"`,".contains(c));
    words.filter(suspicious).any(|word| input.iter().any(|value| value.contains(word)))
}

/// The option with the wrong value and the environment variable that set it, if one did.
fn source_variable(error: &clap::Error) -> Option<(String, String)> {
    let argument = error.get(ContextKind::InvalidArg)?.to_string();
    let value = error.get(ContextKind::InvalidValue)?.to_string();
    let flag = argument.split_whitespace().next()?.strip_prefix("--")?;
    let command = Arguments::command();
    let name = command.get_arguments().find(|known| known.get_long() == Some(flag))?.get_env()?;
    let is_from_there = std::env::var(name).is_ok_and(|set| set == value);
    let is_given_as_flag = std::env::args().skip(1).any(|argument| argument.ends_with(&value));
    (is_from_there && !is_given_as_flag).then(|| (argument.clone(), name.to_string_lossy().into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn time_zone_and_time_of_day_are_optional() {
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
    fn a_rate_is_a_number_and_a_period() {
        let seconds = Duration::from_secs;
        for (text, jobs, period) in [
            ("100/s", 100, seconds(1)),
            ("100/m", 100, seconds(60)),
            ("100/min", 100, seconds(60)),
            ("5/10s", 5, seconds(10)),
            ("1000/h", 1000, seconds(3600)),
            ("1/day", 1, seconds(86_400)),
            ("3 / 500ms", 3, Duration::from_millis(500)),
        ] {
            assert_eq!(rate(text), Ok((jobs, period)), "{text}");
        }
        for text in ["100", "100/", "/m", "-1/m", "1.5/m", "100/fortnight", "100/m/s", ""] {
            assert!(rate(text).is_err_and(|error| error.contains("such as 100/m")), "{text}");
        }
    }

    #[test]
    fn a_pause_ends_at_a_time_or_after_a_duration() {
        assert_eq!(until("2h"), Ok(Until::After(Duration::from_secs(7200))));
        assert_eq!(until("2030-01-31"), Ok(Until::Time("2030-01-31T00:00:00Z".parse().expect("a time"))));
        assert!(until("tomorrow").is_err_and(|error| error.contains("or a duration such as 2h")));
    }

    #[test]
    fn only_user_input_counts_as_a_connection_string() {
        let input = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let help = "-c <URL> such as postgres://user@host:5432/database";
        assert!(!quotes_a_connection(help, &input(&["crontab"])));
        for argument in ["postgres://u:p@h/d", "--jobs=postgres://u:p@h/d", "-jpostgres://u:p@h/d"] {
            assert!(quotes_a_connection("invalid value 'postgres://u:p@h/d' for '--jobs'", &input(&[argument])));
        }
        assert!(quotes_a_connection("unrecognized subcommand 'u:two words@h'", &input(&["u:two words@h"])));
    }
}
