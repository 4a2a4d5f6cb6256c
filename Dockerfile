# assay's core: check, grade, verify, spec. No torch. Build: docker build -t assay .  Run: docker run --rm assay check URL
FROM python:3.12-slim AS build
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip wheel --no-cache-dir --wheel-dir /wheels /src

FROM python:3.12-slim
RUN useradd --create-home assay
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --no-index --find-links /wheels llm-assay && rm -rf /wheels
USER assay
WORKDIR /work
ENTRYPOINT ["assay"]
CMD ["--help"]
