use super::*;
use crate::text::template_functions;

const BUDGET: Budget = Budget {
    fuel: 20_000,
    value_bytes: 4_000,
};

fn engine() -> Environment<'static> {
    let mut environment = Environment::new();
    template_functions::add_to(&mut environment);
    environment
}

fn run(source: &str) -> Result<String, Error> {
    render(engine(), source, Value::from(()), BUDGET)
}

/// The same through the engine's front door, without checks.
fn run_unchecked(source: &str) -> Result<String, Error> {
    let mut environment = engine();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()?;
    environment.set_syntax(syntax);
    environment.set_fuel(Some(BUDGET.fuel));
    environment.render_named_str(NAME, source, ())
}

#[test]
fn checks_change_no_result() {
    for source in [
        "{% set ns = namespace(a=1, b=[]) %}{% for i in range(5) %}{% set ns.a = ns.a + i %}{% set ns.b = ns.b + [i] %}{% endfor %}{{ ns.a }}{{ ns.b }}",
        "{% macro f(x, y=[1, 2]) %}{{ x }}-{{ y }}{{ caller() if caller else '' }}{% endmacro %}{{ f(3) }}{% call f('a', y={'k': 1}) %}in{% endcall %}",
        "{% for k, v in {'a': 1, 'b': [2]}.items() recursive %}{{ k }}{{ v }}{% else %}none{% endfor %}{% for x in [] %}x{% else %}none{% endfor %}",
        "{% for x in [[1, [2]], 3] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}",
        "{{ [] or [1] }}{{ [] and [2] }}{{ ('a' if true else [3]) }}{{ 1 < 2 < 3 }}{{ (1, 2) + (3,) }}{{ [1] * 3 }}",
        "{% with a = [1], b = 2 %}{{ a + [b] }}{% endwith %}{% filter upper %}x{{ 'y' ~ 1 }}{% endfilter %}{% set c %}z{% endset %}{{ c }}",
        "{{ [1, 2, 3] | map('string') | join('-') }}{{ range(4) | list }}{{ [3, 1] | sort | reverse | list }}{{ dict(a=1) }}",
        "{% block b %}{{ [1] }}{% endblock %}{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
        "{{ namespace(a=[1]).a }}{{ [1, 2][0] }}{{ {'a': [1]}['a'] }}{{ [1, 2, 3][1:] }}{{ undefined_name }}",
    ] {
        let expected = run_unchecked(source).unwrap_or_else(|error| panic!("{source}: {error}"));
        assert_eq!(
            run(source).unwrap_or_else(|error| panic!("{source}: {error}")),
            expected,
            "{source}"
        );
    }
}

#[test]
fn an_error_has_the_line_it_has_without_checks() {
    for source in [
        "a\n\n{{ [1] + nothing() }}",
        "{% if [1] %}\n{{ 1 | no_filter }}\n{% endif %}",
        "\n{% for %}",
    ] {
        let expected = run_unchecked(source).expect_err(source);
        let error = run(source).expect_err(source);
        assert_eq!(
            (error.line(), error.kind()),
            (expected.line(), expected.kind()),
            "{source}"
        );
    }
}

#[test]
fn what_grows_by_sharing_is_stopped_where_it_is_built() {
    for grow in [
        "[ns.s, ns.s]",
        "{'a': ns.s, 'b': ns.s}",
        "(ns.s, ns.s)",
        "ns.s + ns.s",
        "[ns.s] * 2",
        "dict(a=ns.s, b=ns.s)",
        "namespace(a=ns.s).a + ns.s",
        "[ns.s, 1] | batch(1) | list + [ns.s]",
        "[ns.s]",
    ] {
        let source = format!(
            "{{% set ns = namespace(s=[1]) %}}{{% for i in range(60) %}}{{% set ns.s = {grow} %}}{{% endfor %}}{{{{ ns.s }}}}"
        );
        assert!(run(&source).is_err(), "{grow}");
    }
    let recursive = "{% macro f(x) %}{{ f([x, x]) }}{% endmacro %}{{ f(1) }}";
    assert!(run(recursive).is_err());
}

#[test]
fn a_namespace_cannot_come_to_hold_itself() {
    for source in [
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns }}",
        "{% set a = namespace() %}{% set b = namespace() %}{% set a.x = b %}{% set b.x = a %}{{ a }}",
        "{% set ns = namespace() %}{% set ns.x = dict(a=ns) %}{{ ns }}",
        "{% set a = namespace() %}{% set b = namespace(x=a) %}",
    ] {
        assert!(run(source).is_err(), "{source}");
    }
}
