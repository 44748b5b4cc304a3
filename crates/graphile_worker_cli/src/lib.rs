//! The command line `graphile-worker`, as a library, so that an application can embed it with its own tasks.
//!
//! | question | file |
//! | --- | --- |
//! | Which commands and options are there? | `arguments` |
//! | How are options, environment and configuration file merged? | `settings`; for the database, `connection` |
//! | How are jobs run? | `run` |
//! | How does `dev` run without a database? | `dev` |
//! | How do the operators' commands work? | `operate` |
//! | When does a crontab fire, and what is wrong with it? | `crontab` |
//! | How are tables and times formatted? | `table` |
//! | How are log lines formatted? | `log` |
//! | How are errors and exit codes reported? | `failure` |
//! | How are signals handled? | `signals`, and while jobs run, `run` |
//!
//! Results go to standard output, logs and errors to standard error.
//!
//! | exit code | meaning |
//! | --- | --- |
//! | 0 | success; for a worker, also a clean stop by a signal |
//! | 1 | failure |
//! | 2 | usage error |
//! | 57 | stopped because a newer release takes over the schema (the same code as Node's worker) |
//! | 128 + n | interrupted by signal n; for a worker, by its second signal |
//!
//! The passwords of your databases are never printed. `dev` prints the URL of its private server, password included, so
//! that you can paste it into another terminal.

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

use arguments::{Arguments, Command, ParsedArguments};
use clap::CommandFactory;
use connection::Database;
use failure::Failure;
use graphile_worker::WorkerOptions;
use log::LogFormat;
use run::Application;
use settings::{ConfigFile, RunSettings};
use signals::Signals;

/// Runs the command line of this process, then exits.
pub async fn main() -> ! {
    exit_with(dispatch(Application::plain()).await)
}

/// Runs the command line of this process with the application's own tasks, then exits.
///
/// It has all commands of `graphile-worker`. Without a command, it runs the jobs of these tasks, and of a folder
/// `tasks` if it exists. Command-line options, environment and configuration file override `options`. The database and
/// schema of `options` are used if none is set elsewhere.
///
/// Recovery of dead workers' jobs is as in `options`: off unless you turn it on, as this example does.
///
/// ```no_run
/// use graphile_worker::{WorkerContext, WorkerOptions, WorkerRecoveryConfig};
///
/// #[tokio::main]
/// async fn main() {
///     let options = WorkerOptions::default()
///         .worker_recovery(WorkerRecoveryConfig::default().enabled(true))
///         .define_task("hello", |name: String, _ctx: WorkerContext| async move { println!("Hello, {name}") });
///     graphile_worker_cli::main_with(options).await
/// }
/// ```
pub async fn main_with(options: WorkerOptions) -> ! {
    exit_with(dispatch(Application { options, has_own_tasks: true }).await)
}

/// Exits at once, even if a task handler blocks its thread.
fn exit_with(result: Result<(), Failure>) -> ! {
    std::process::exit(result.map_or_else(Failure::report, |()| 0))
}

async fn dispatch(application: Application) -> Result<(), Failure> {
    let arguments = match arguments::read()? {
        ParsedArguments::Run(arguments) => *arguments,
        ParsedArguments::Print(text) => return output::print(&text),
    };
    let Arguments { global, run, maintenance, command } = arguments;
    if let Some(connection) = &global.connection {
        if matches!(command, Some(Command::Dev(_))) {
            let message = "`dev` has its own database: remove -c, or remove `dev`";
            return Err(Failure::Usage(message.to_owned()));
        }
        connection::hide_password(connection, "DATABASE_URL")?;
    }
    if let Some(direct) =
        run.direct_connection.as_deref().filter(|_| arguments::is_given_as_flag("--direct-connection"))
    {
        connection::direct(direct)?;
        connection::hide_password(direct, arguments::DIRECT_CONNECTION)?;
    }
    let file = ConfigFile::read(global.config.as_deref())?;
    let only_maintains = maintenance.schema_only || maintenance.cleanup.is_some();
    let runs_jobs = matches!(command, None | Some(Command::Dev(_))) && !only_maintains;
    let format = global.log_format.or(file.log_format).unwrap_or(LogFormat::Text);
    log::start(format, if runs_jobs { "info" } else { "warn" });
    let schema = settings::schema(&global, &file, &application.options);
    let database = || {
        let application = application.options.database_config();
        let found = Database::find(global.connection.as_deref(), file.connection.as_deref(), application, &schema)?;
        let command = global.password_command.clone().or_else(|| file.password_command.clone());
        Ok::<_, Failure>(found.with_password_command(command))
    };
    match command {
        None => {
            let database = database()?;
            let mut signals = Signals::listen()?;
            match &maintenance.cleanup {
                _ if maintenance.schema_only => {
                    let wait = RunSettings::new(run, file)?.max_migration_wait;
                    signals.unless_signalled(operate::migrate(wait, &database)).await
                }
                Some(tasks) => signals.unless_signalled(run::cleanup(tasks, &database)).await,
                None => {
                    let settings = RunSettings::new(run, file)?;
                    // Report errors in files before touching the database.
                    let options = run::worker_options(application, &settings)?;
                    run::run(options, &settings, &database, &mut signals).await
                }
            }
        }
        Some(Command::Operate(operate::Command::Grant(args))) if args.only_prints() => args.print(&schema),
        Some(Command::Operate(command)) => {
            let database = database()?;
            Signals::listen()?.unless_signalled(operate::run(command, &database)).await
        }
        Some(Command::Crontab(command)) => {
            let database = database().ok();
            Signals::listen()?.unless_signalled(crontab::run(command, database.as_ref())).await
        }
        Some(Command::Completions { shell }) => output::print(&completions(shell)),
        Some(Command::Man) => {
            let mut page = Vec::new();
            clap_mangen::Man::new(Arguments::command()).render(&mut page)?;
            output::print(&String::from_utf8_lossy(&page))
        }
        Some(Command::Dev(args)) => {
            let mut settings = RunSettings::new(args.run, file)?;
            settings.watch = true;
            // It belongs to another database than that of `dev`.
            settings.direct_connection = None;
            dev::dev(application, &settings, &schema, args.reset, &mut Signals::listen()?).await
        }
    }
}

fn completions(shell: clap_complete::Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "graphile-worker", &mut script);
    let script = String::from_utf8_lossy(&script);
    // In some labels of its bash script, clap_complete takes the part of the program name after the hyphen for a
    // subcommand. Without this fix, bash would not complete any subcommand.
    script.replace("graphile__subcmd__worker", "graphile__worker")
}
