//! Where a setting comes from: the command line, else `TIDEMILL_*`, else the TOML file, else the default.
//!
//! A file holds keys named like the flags (`kv-bytes = 1000`); an unknown key refuses to start, since a
//! misspelt setting that is silently ignored is found at the worst time. File values become arguments in front of
//! the given ones, so that one parser (clap) checks every value, whatever its source.

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;

/// Exit status of a bad configuration (`EX_USAGE`).
pub const EXIT_CONFIG: i32 = 64;

/// Parses `T` from the process's arguments, environment and `--config FILE`. Ends the process with status 64
/// and a message when a value does not hold.
pub fn parse<T: clap::Parser>() -> T {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    match parse_from::<T>(arguments) {
        Ok(config) => config,
        Err(error) => exit_with(&error),
    }
}

fn exit_with(error: &clap::Error) -> ! {
    // clap prints help and version on standard output and counts them as a success.
    let _ = error.print();
    std::process::exit(if error.use_stderr() { EXIT_CONFIG } else { 0 });
}

/// Says on standard output that `--check-config` has found nothing wrong.
pub fn say_valid(role: &str, listen: &str, model: &Path) {
    // Nobody reads a closed standard output; the exit status says the same.
    let _ = writeln!(std::io::stdout(), "{}", valid_line(role, listen, model));
}

fn valid_line(role: &str, listen: &str, model: &Path) -> String {
    let model = model.display();
    format!("configuration is valid: role={role} listen={listen} model={model}")
}

/// Parses `T` from these arguments (the first names the program).
///
/// # Errors
/// clap's error, also for an unreadable file or an unknown key.
pub fn parse_from<T: clap::Parser>(arguments: Vec<OsString>) -> Result<T, clap::Error> {
    let whole = T::command();
    let (command, n_names) = chosen(&whole, &arguments);
    let mut all: Vec<OsString> = arguments.iter().take(n_names).cloned().collect();
    let has_file = command
        .get_arguments()
        .any(|argument| argument.get_long() == Some("config"));
    if let Some(path) = config_path(&arguments).filter(|_| has_file) {
        let from_file = file_arguments(command, Path::new(&path), &arguments)
            .map_err(|text| T::command().error(clap::error::ErrorKind::InvalidValue, text))?;
        all.extend(from_file);
    }
    all.extend(arguments.into_iter().skip(n_names));
    T::try_parse_from(all)
}

/// The command that is meant, and how many arguments name it: the program's, or a subcommand's too.
fn chosen<'a>(whole: &'a clap::Command, arguments: &[OsString]) -> (&'a clap::Command, usize) {
    let name = arguments.get(1).and_then(|argument| argument.to_str());
    let subcommand = name.and_then(|name| whole.find_subcommand(name));
    subcommand.map_or((whole, 1), |subcommand| (subcommand, 2))
}

fn config_path(arguments: &[OsString]) -> Option<OsString> {
    let mut rest = arguments.iter().skip(1);
    while let Some(argument) = rest.next() {
        if argument == "--config" {
            return rest.next().cloned();
        }
        if let Some(path) = argument
            .to_str()
            .and_then(|text| text.strip_prefix("--config="))
        {
            return Some(path.into());
        }
    }
    std::env::var_os("TIDEMILL_CONFIG")
}

fn file_arguments(
    command: &clap::Command,
    path: &Path,
    given: &[OsString],
) -> Result<Vec<OsString>, String> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("--config {}: {error}", path.display()))?;
    let table: toml::Table = text
        .parse()
        .map_err(|error| format!("--config {}: {error}", path.display()))?;
    let mut arguments = Vec::new();
    for (key, value) in &table {
        let argument = command
            .get_arguments()
            .find(|argument| argument.get_long() == Some(key.as_str()))
            .ok_or_else(|| format!("--config {}: unknown key {key:?}", path.display()))?;
        let is_overridden = is_given(given, key)
            || argument
                .get_env()
                .is_some_and(|name| std::env::var_os(name).is_some());
        if !is_overridden {
            arguments.extend(flag_of(key, value).map_err(|problem| {
                format!("--config {}: key {key:?} {problem}", path.display())
            })?);
        }
    }
    Ok(arguments)
}

fn is_given(given: &[OsString], key: &str) -> bool {
    given
        .iter()
        .filter_map(|argument| argument.to_str())
        .any(|argument| {
            argument
                .strip_prefix("--")
                .is_some_and(|rest| rest == key || rest.starts_with(&format!("{key}=")))
        })
}

fn flag_of(key: &str, value: &toml::Value) -> Result<Option<OsString>, &'static str> {
    let flag = |text: String| Ok(Some(format!("--{key}={text}").into()));
    match value {
        toml::Value::Boolean(true) => Ok(Some(format!("--{key}").into())),
        toml::Value::Boolean(false) => Ok(None),
        toml::Value::String(text) => flag(text.clone()),
        toml::Value::Integer(number) => flag(number.to_string()),
        toml::Value::Float(number) => flag(number.to_string()),
        _ => Err("is a table, a list or a date; a text, number or boolean is needed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser, Debug)]
    struct Flags {
        #[arg(long)]
        config: Option<String>,
        #[arg(long, default_value_t = 1)]
        kv_blocks: u32,
        #[arg(long)]
        insecure_network: bool,
    }

    fn parse_with_file(name: &str, text: &str, more: &[&str]) -> Result<Flags, clap::Error> {
        let path =
            std::env::temp_dir().join(format!("tidemill-config-{}-{name}", std::process::id()));
        std::fs::write(&path, text).expect("the temporary directory is writable");
        let mut arguments: Vec<OsString> =
            vec!["test".into(), "--config".into(), path.clone().into()];
        arguments.extend(more.iter().map(OsString::from));
        let parsed = parse_from(arguments);
        std::fs::remove_file(path).expect("just written");
        parsed
    }

    #[test]
    fn a_flag_beats_the_file_and_the_file_beats_the_default() {
        let text = "kv-blocks = 5\ninsecure-network = true\n";
        let flags = parse_with_file("a", text, &[]).expect("valid");
        assert_eq!((flags.kv_blocks, flags.insecure_network), (5, true));
        let flags = parse_with_file("b", text, &["--kv-blocks", "7"]).expect("valid");
        assert_eq!(flags.kv_blocks, 7);
    }

    #[derive(Parser, Debug)]
    enum Commands {
        Serve(Flags),
        Pull { name: String },
    }

    #[test]
    fn a_file_serves_the_subcommand_that_has_its_keys() {
        let path = std::env::temp_dir().join(format!("tidemill-config-{}-sub", std::process::id()));
        std::fs::write(&path, "kv-blocks = 5\n").expect("the temporary directory is writable");
        let config = path.to_str().expect("an ASCII path");
        let parse = |arguments: &[&str]| {
            parse_from::<Commands>(arguments.iter().map(OsString::from).collect())
        };
        let serve = parse(&["test", "serve", "--config", config]).expect("valid");
        assert!(matches!(serve, Commands::Serve(Flags { kv_blocks: 5, .. })));
        assert!(
            parse(&["test", "pull", "--config", config]).is_err(),
            "it has no such flag"
        );
        let pull = parse(&["test", "pull", "x"]).expect("valid");
        assert!(matches!(pull, Commands::Pull { name } if name == "x"));
        std::fs::remove_file(path).expect("just written");
    }

    #[test]
    fn a_valid_configuration_is_told_in_one_line() {
        let line = valid_line("decode", "127.0.0.1:7002", Path::new("m.gguf"));
        let wanted = "configuration is valid: role=decode listen=127.0.0.1:7002 model=m.gguf";
        assert_eq!(line, wanted);
    }

    #[test]
    fn an_unknown_key_refuses() {
        let error = parse_with_file("c", "kv-blokcs = 5\n", &[]).expect_err("misspelt");
        assert!(error.to_string().contains("kv-blokcs"), "{error}");
    }

    #[test]
    fn a_value_out_of_type_refuses() {
        assert!(parse_with_file("d", "kv-blocks = \"many\"\n", &[]).is_err());
        assert!(parse_with_file("e", "kv-blocks = [1]\n", &[]).is_err());
    }
}
