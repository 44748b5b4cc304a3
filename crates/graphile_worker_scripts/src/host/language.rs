//! Languages: which files a host runs, which program runs the host, and whether that is recent enough.

use super::HostOptions;
use super::process::START_TIMEOUT;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

const NODE_HOST: &str = include_str!("node.cjs");
const PYTHON_HOST: &str = include_str!("python.py");

/// What the built-in hosts are started with: it reads their source from the socket and runs it, so that a list of processes
/// stays readable, and no file has to be written. `LENGTH` stands for the number of bytes.
const NODE_BOOTSTRAP: &str = "{const fs=require('node:fs'),source=Buffer.alloc(LENGTH);\
for(let at=0,n;at<LENGTH;at+=n)if(!(n=fs.readSync(+process.env.GRAPHILE_WORKER_HOST_FD,source,at,LENGTH-at)))process.exit(1);\
(0,eval)(source+'//# sourceURL=[eval]')}";
const PYTHON_BOOTSTRAP: &str = "import os,socket,sys
s=socket.socket(fileno=os.dup(int(os.environ['GRAPHILE_WORKER_HOST_FD'])))
source=s.recv(LENGTH,socket.MSG_WAITALL)
s.close()
if len(source)<LENGTH: sys.exit(1)
exec(compile(source,'<graphile-worker host>','exec'),{'__name__':'__main__'})";

/// The oldest versions whose languages the embedded hosts are written in.
const LOWEST_NODE: [u32; 2] = [18, 0];
const LOWEST_PYTHON: [u32; 2] = [3, 9];

/// The folder of a program's own packages, in a project.
const VIRTUAL_ENVIRONMENT: &str = ".venv";

/// A language that task files are written in.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Language {
    /// JavaScript, and TypeScript where Node knows how to strip it of its types.
    JavaScript,
    Python,
    /// One whose host somebody else wrote.
    Other(Arc<OtherLanguage>),
}

/// A language whose host is the application's own.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct OtherLanguage {
    pub(crate) name: String,
    pub(crate) extensions: Vec<String>,
    pub(crate) command: Vec<String>,
}

impl Language {
    pub(crate) fn name(&self) -> &str {
        match self {
            Language::JavaScript => "JavaScript",
            Language::Python => "Python",
            Language::Other(other) => &other.name,
        }
    }

    /// The endings of its files, without the dot. Where several files differ only in that, the first is meant.
    pub(crate) fn extensions(&self) -> Vec<&str> {
        match self {
            Language::JavaScript => vec!["js", "cjs", "mjs", "ts", "mts"],
            Language::Python => vec!["py"],
            Language::Other(other) => other.extensions.iter().map(String::as_str).collect(),
        }
    }

    /// The source of its host, which the program reads from the socket; empty if the application has a host of its own.
    pub(crate) fn source(&self) -> &'static str {
        match self {
            Language::JavaScript => NODE_HOST,
            Language::Python => PYTHON_HOST,
            Language::Other(_) => "",
        }
    }

    /// The program and arguments that start its host, once it is known that they can.
    pub(crate) async fn command(&self, options: &HostOptions, tasks_dir: &Path) -> Result<Vec<String>, String> {
        match self {
            Language::JavaScript => {
                let program = options.node.clone().unwrap_or_else(|| PathBuf::from("node"));
                let version = checked_version("Node", &program, LOWEST_NODE, "(`--node`, `HostOptions::node`)").await?;
                let mut command = vec![program.to_string_lossy().into_owned()];
                if needs_strip_types(version) {
                    command.push("--experimental-strip-types".to_owned());
                }
                // `NODE_OPTIONS` may ask for modules.
                command.push("--input-type=commonjs".to_owned());
                command.extend(["--eval".to_owned(), bootstrap(NODE_BOOTSTRAP, NODE_HOST)]);
                Ok(command)
            }
            Language::Python => {
                let program = options.python.clone().unwrap_or_else(|| python_of(tasks_dir));
                checked_version("Python", &program, LOWEST_PYTHON, "(`--python`, `HostOptions::python`)").await?;
                let bootstrap = bootstrap(PYTHON_BOOTSTRAP, PYTHON_HOST);
                Ok(vec![program.to_string_lossy().into_owned(), "-c".to_owned(), bootstrap])
            }
            Language::Other(other) => Ok(other.command.clone()),
        }
    }
}

fn bootstrap(program: &str, source: &str) -> String {
    program.replace("LENGTH", &source.len().to_string())
}

/// The Python of the active or the project's virtual environment, else the system's.
fn python_of(tasks_dir: &Path) -> PathBuf {
    let active = std::env::var_os("VIRTUAL_ENV").filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let projects = tasks_dir.ancestors().skip(1).map(|folder| folder.join(VIRTUAL_ENVIRONMENT));
    active
        .into_iter()
        .chain(projects)
        .map(|folder| folder.join("bin").join("python"))
        .find(|program| program.exists())
        .unwrap_or_else(|| PathBuf::from("python3"))
}

/// Node knew how to strip types before it did so unasked.
fn needs_strip_types(version: [u32; 2]) -> bool {
    ([22, 6]..[22, 18]).contains(&version) || ([23, 0]..[23, 6]).contains(&version)
}

/// The version of a program, if there is one and it is recent enough.
async fn checked_version(name: &str, program: &Path, lowest: [u32; 2], option: &str) -> Result<[u32; 2], String> {
    let asked = tokio::process::Command::new(program).arg("--version").stdin(Stdio::null()).kill_on_drop(true).output();
    let Ok(asked) = tokio::time::timeout(START_TIMEOUT, asked).await else {
        return Err(format!("`{} --version` did not end within {START_TIMEOUT:?}", program.display()));
    };
    let output = match asked {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let searched = if program.components().count() > 1 { "does not exist" } else { "is not on the PATH" };
            return Err(format!("`{}` {searched}: install {name}, or say where it is {option}", program.display()));
        }
        Err(error) => return Err(format!("`{}` cannot be started: {error}", program.display())),
    };
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let Some(version) = read_version(&text) else {
        // Why it does not start is what it says elsewhere: an option that it does not know, a library that is missing.
        let said = format!("{text}\n{}", String::from_utf8_lossy(&output.stderr));
        let said = said.trim();
        return Err(format!("`{} --version` said {said:?}, expected the version of {name}", program.display()));
    };
    if version < lowest {
        let [major, minor] = lowest;
        return Err(format!("`{}` is {text}, expected {name} {major}.{minor} or later", program.display()));
    }
    Ok(version)
}

/// `v20.1.0`, `Python 3.11.7`.
fn read_version(text: &str) -> Option<[u32; 2]> {
    let mut numbers = text.trim_start_matches(|c: char| !c.is_ascii_digit()).split('.').map(str::parse);
    Some([numbers.next()?.ok()?, numbers.next()?.ok()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_programs_say_them() {
        assert_eq!(read_version("v20.20.2"), Some([20, 20]));
        assert_eq!(read_version("Python 3.11.7"), Some([3, 11]));
        assert_eq!(read_version("Python 3.14.0rc1"), Some([3, 14]));
        assert_eq!(read_version("command not found"), None);
    }

    #[test]
    fn type_stripping_is_asked_for_where_node_has_it_and_does_not_do_it_unasked() {
        let asked: Vec<[u32; 2]> = [[20, 20], [22, 5], [22, 6], [22, 17], [22, 18], [23, 0], [23, 5], [23, 6], [24, 1]]
            .into_iter()
            .filter(|version| needs_strip_types(*version))
            .collect();
        assert_eq!(asked, [[22, 6], [22, 17], [23, 0], [23, 5]]);
    }

    #[tokio::test]
    async fn a_program_that_is_missing_or_not_what_it_should_be_is_named() {
        let missing =
            checked_version("Node", Path::new("no-such-node"), LOWEST_NODE, "(`--node`, `HostOptions::node`)").await;
        assert_eq!(
            missing.expect_err("no such program"),
            "`no-such-node` is not on the PATH: install Node, or say where it is (`--node`, `HostOptions::node`)"
        );
        let other = checked_version("Node", Path::new("/bin/true"), LOWEST_NODE, "").await;
        assert!(other.expect_err("not Node").ends_with("expected the version of Node"));
        let old = checked_version("Python", Path::new("python3"), [99, 0], "").await.expect_err("too old");
        assert!(old.ends_with("expected Python 99.0 or later"), "{old}");
    }
}
