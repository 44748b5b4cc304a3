//! The command line `graphile-worker`: what it accepts, what it prints, how it exits.
//!
//! | question | file |
//! | --- | --- |
//! | What does it accept? | `arguments` |
//! | What is set, by flags, environment, file? | `settings`, and for the database `connection` |
//! | How are jobs run? | `run` |
//! | How does it run without a database? | `dev` |
//! | What does an operator ask? | `operate` |
//! | When does a crontab fire, and what is wrong with it? | `crontab` |
//! | How do tables and times look? | `table` |
//! | How do log lines look? | `log` |
//! | How does it fail? | `failure` |
//!
//! Results go to standard output, log lines and failures to standard error. Exit codes: 0 done, also after a clean stop
//! by a signal; 1 failed; 2 wrong usage; 57, as with Node's, left because a newer release takes over the schema; 128 + n ended
//! at once by the signal n. A password is never printed.

mod arguments;
mod connection;
mod crontab;
mod dev;
mod failure;
mod log;
mod operate;
mod output;
mod run;
mod settings;
mod signals;
mod table;

use arguments::{Arguments, Command, Read};
use clap::CommandFactory;
use connection::Database;
use failure::Failure;
use graphile_worker::WorkerOptions;
use log::LogFormat;
use run::Application;
use settings::{ConfigFile, RunSettings};
use signals::Signals;

/// Runs the command line of this process, and ends the process.
pub async fn main() -> ! {
    end_with(do_what_is_asked(Application::plain()).await)
}

/// Runs the command line of this process with the application's own tasks compiled in, and ends the process.
///
/// It is the whole of `graphile-worker`: without a command it runs the jobs of these tasks, and of a folder `tasks` where
/// there is one. What flags, environment and configuration file say wins over the options; the database and the schema
/// that the options name are used where nobody says otherwise.
///
/// ```no_run
/// use graphile_worker::{WorkerContext, WorkerOptions};
///
/// #[tokio::main]
/// async fn main() {
///     let options = WorkerOptions::default()
///         .define_task("hello", |name: String, _ctx: WorkerContext| async move { println!("Hello, {name}") });
///     graphile_worker_cli::main_with(options).await
/// }
/// ```
pub async fn main_with(options: WorkerOptions) -> ! {
    end_with(do_what_is_asked(Application { options, has_own_tasks: true }).await)
}

/// Ends the process at once: a handler that blocks its thread must not keep it.
fn end_with(ended: Result<(), Failure>) -> ! {
    std::process::exit(ended.map_or_else(Failure::tell, |()| 0))
}

async fn do_what_is_asked(application: Application) -> Result<(), Failure> {
    let arguments = match arguments::read()? {
        Read::Asked(arguments) => *arguments,
        Read::Words(words) => return output::print(&words),
    };
    let Arguments { global, run, tidy, command } = arguments;
    if let Some(connection) = &global.connection {
        if matches!(command, Some(Command::Dev(_))) {
            let message = "`dev` has a database of its own: leave out -c, or leave out `dev`";
            return Err(Failure::Usage(message.to_owned()));
        }
        connection::keep_out_of_sight(connection)?;
    }
    let file = ConfigFile::read(global.config.as_deref())?;
    let only_tidies = tidy.schema_only || tidy.cleanup.is_some();
    let runs_jobs = matches!(command, None | Some(Command::Dev(_))) && !only_tidies;
    let format = global.log_format.or(file.log_format).unwrap_or(LogFormat::Text);
    log::start(format, if runs_jobs { "info" } else { "warn" });
    let schema = settings::schema(&global, &file, &application.options);
    let database = || {
        let of_application = application.options.connect_options();
        Database::find(global.connection.as_deref(), file.connection.as_deref(), of_application, &schema)
    };
    match command {
        None => {
            let database = database()?;
            let mut signals = Signals::listen()?;
            match &tidy.cleanup {
                _ if tidy.schema_only => {
                    let wait = RunSettings::new(run, file)?.max_migration_wait;
                    signals.unless_told(operate::migrate(wait, &database)).await
                }
                Some(tasks) => signals.unless_told(run::cleanup(tasks, &database)).await,
                None => {
                    let settings = RunSettings::new(run, file)?;
                    // What is wrong with files is told before anything is done to the database.
                    let options = run::describe(application, &settings)?;
                    run::run(options, &settings, &database, &mut signals).await
                }
            }
        }
        Some(Command::Operate(command)) => {
            let database = database()?;
            Signals::listen()?.unless_told(operate::run(command, &database)).await
        }
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
        Some(Command::Dev(asked)) => {
            let mut settings = RunSettings::new(asked.run, file)?;
            settings.watch = true;
            dev::dev(application, &settings, &schema, asked.reset, &mut Signals::listen()?).await
        }
    }
}
