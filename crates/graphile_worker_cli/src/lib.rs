//! The command line `graphile-worker`: what it accepts, what it prints, how it exits.
//!
//! | question | file |
//! | --- | --- |
//! | What does it accept? | `arguments` |
//! | What is set, by flags, environment, file? | `settings`, and for the database `connection` |
//! | How are jobs run? | `run` |
//! | What does an operator ask? | `operate` |
//! | When does a crontab fire, and what is wrong with it? | `crontab` |
//! | How do log lines look? | `log` |
//! | How does it fail? | `failure` |
//!
//! Results go to standard output, log lines and failures to standard error. Exit codes: 0 done, also after a clean stop
//! by a signal; 1 failed; 2 wrong usage; 128 + n ended at once by the signal n. A password is never printed.

mod arguments;
mod connection;
mod crontab;
mod failure;
mod log;
mod operate;
mod output;
mod run;
mod settings;

use arguments::{Arguments, Command, Read};
use clap::CommandFactory;
use connection::Database;
use failure::Failure;
use log::LogFormat;
use settings::{ConfigFile, RunSettings};
use std::process::ExitCode;

/// Runs the command line of this process and says how it ended.
pub async fn main() -> ExitCode {
    match do_what_is_asked().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.tell(),
    }
}

async fn do_what_is_asked() -> Result<(), Failure> {
    let arguments = match arguments::read()? {
        Read::Asked(arguments) => *arguments,
        Read::Words(words) => return output::print(&words),
    };
    let Arguments { global, run, command } = arguments;
    let file = ConfigFile::read(global.config.as_deref())?;
    let runs_jobs = matches!(command, None | Some(Command::Dev(_))) && !run.schema_only && run.cleanup.is_none();
    let format = global.log_format.or(file.log_format).unwrap_or(LogFormat::Text);
    log::start(format, if runs_jobs { "info" } else { "warn" });
    let database =
        || Database::find(global.connection.as_deref(), file.connection.as_deref(), settings::schema(&global, &file));
    match command {
        None if run.schema_only => operate::migrate(&database()?).await,
        None => {
            let database = database()?;
            run::run(RunSettings::new(run, file)?, &database).await
        }
        Some(Command::Operate(command)) => operate::run(command, &database()?).await,
        Some(Command::Crontab(command)) => crontab::run(command),
        Some(Command::Completions { shell }) => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "graphile-worker", &mut script);
            output::print(&String::from_utf8_lossy(&script))
        }
        Some(Command::Man) => {
            let mut page = Vec::new();
            clap_mangen::Man::new(Arguments::command()).render(&mut page)?;
            output::print(&String::from_utf8_lossy(&page))
        }
        Some(Command::Dev(_)) => Err(Failure::because("not here yet")),
    }
}
